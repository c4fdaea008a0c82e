/* A caller that was compiled when the structs had fewer fields. What it does not know is as if it
 * were zero, and not a byte behind what it knows is read: the structs are blocks of their own, so
 * that a sanitizer sees it. */
#define _DEFAULT_SOURCE
#define _DARWIN_C_SOURCE
#include <evalrt.h>

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(what)                                                              \
    do {                                                                         \
        if (!(what)) {                                                           \
            fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #what); \
            exit(1);                                                             \
        }                                                                        \
    } while (0)

/* The structs at their shortest. */
typedef struct OldConfig {
    size_t struct_size;
    const char *backend, *model, *url, *executable;
} OldConfig;

typedef struct OldRequest {
    size_t struct_size;
    const char *prompt, *messages_json;
} OldRequest;

typedef struct OldEvent {
    size_t struct_size;
    evalrt_id id;
    evalrt_kind kind;
    int32_t http_status;
    const char* text;
    size_t text_size;
    const evalrt_error* error;
} OldEvent;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static int done;

static void on_event(void* user, const evalrt_event* given) {
    const OldEvent* event = (const OldEvent*)(const void*)given;
    CHECK(event->struct_size >= sizeof *event);
    CHECK(event->kind == EVALRT_DONE && !event->error && event->http_status == 200);
    CHECK(strcmp(event->text, user) == 0 && event->text_size == strlen(user));
    pthread_mutex_lock(&mutex);
    ++done;
    pthread_cond_signal(&changed);
    pthread_mutex_unlock(&mutex);
}

/* The first `size` bytes, and nothing behind them. */
static void* cut(const void* whole, size_t size) {
    void* block = malloc(size);
    CHECK(block);
    memcpy(block, whole, size);
    memcpy(block, &size, sizeof size);
    return block;
}

static void ask_with(evalrt_runtime* runtime, const void* request, size_t size) {
    void* block = cut(request, size);
    evalrt_error* error = evalrt_submit(runtime, block, on_event, "answer to hi ", NULL);
    free(block);
    if (error) fprintf(stderr, "%s\n", evalrt_error_message(error));
    CHECK(!error);
    pthread_mutex_lock(&mutex);
    while (!done) pthread_cond_wait(&changed, &mutex);
    done = 0;
    pthread_mutex_unlock(&mutex);
}

static evalrt_runtime* open_with(const void* config, size_t size) {
    void* block = cut(config, size);
    evalrt_runtime* runtime;
    evalrt_error* error = evalrt_open(block, &runtime);
    free(block);
    if (error) fprintf(stderr, "%s\n", evalrt_error_message(error));
    CHECK(!error && runtime);
    return runtime;
}

int main(void) {
    const OldConfig old_config = {0, "mlx-server", "small", NULL, FAKE_SERVER};
    const OldRequest old_request = {0, NULL, "[{\"role\": \"user\", \"content\": \"hi\"}]"};
    evalrt_runtime* old = open_with(&old_config, sizeof old_config);
    ask_with(old, &old_request, sizeof old_request);

    /* Every version between that and this one. */
    const evalrt_request request = {.messages_json = old_request.messages_json,
                                    .max_tokens = 5,
                                    .timeout_ms = 600000,
                                    .session = "session",
                                    .name = "name"};
    for (size_t size = sizeof old_request; size <= sizeof request; size += sizeof(void*))
        ask_with(old, &request, size);

    const char* no_arguments[] = {NULL};
    const evalrt_config config = {.backend = "openai-url",
                                  .url = evalrt_url(old),
                                  .server_args = no_arguments,
                                  .api_key = "key",
                                  .order = "fifo",
                                  .max_in_flight = 2,
                                  .startup_timeout_ms = 600000,
                                  .wire = "openai",
                                  .parity = 1,
                                  .no_probe = true};
    for (size_t size = sizeof old_config; size <= sizeof config; size += sizeof(void*)) {
        evalrt_runtime* runtime = open_with(&config, size);
        ask_with(runtime, &request, sizeof request);
        evalrt_release(runtime);
    }

    /* Before even that: said, not guessed. */
    for (size_t size = sizeof(size_t); size < sizeof old_request; size += sizeof(void*)) {
        void* block = cut(&request, size);
        evalrt_error* error = evalrt_submit(old, block, on_event, NULL, NULL);
        CHECK(evalrt_error_code(error) == EVALRT_INVALID);
        evalrt_error_free(error);
        free(block);
    }
    evalrt_release(old);
    puts("ok: old callers");
    return 0;
}
