/* Asks a model server one question:  ask_c http://127.0.0.1:8080/v1 "The capital of France is" */
#include <evalrt.h>

#include <pthread.h>
#include <stdio.h>

struct answer {
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    bool done;
    evalrt_code code;
};

static void on_event(void* user, const evalrt_event* event) {
    struct answer* answer = user;
    if (event->kind != EVALRT_DONE) return;
    puts(event->error ? evalrt_error_message(event->error) : event->text);
    pthread_mutex_lock(&answer->mutex);
    answer->done = true;
    answer->code = evalrt_error_code(event->error);
    pthread_cond_signal(&answer->changed);
    pthread_mutex_unlock(&answer->mutex);
}

static int fail(evalrt_error* error) {
    fprintf(stderr, "%s\n", evalrt_error_message(error));
    evalrt_error_free(error);
    return 1;
}

int main(int argc, char** argv) {
    if (argc != 3) return fputs("usage: ask_c URL PROMPT\n", stderr), 2;
    evalrt_config config = {.struct_size = sizeof config, .backend = "openai-url", .url = argv[1]};
    evalrt_runtime* runtime;
    evalrt_error* error = evalrt_open(&config, &runtime);
    if (error) return fail(error);

    evalrt_request request = {.struct_size = sizeof request, .prompt = argv[2], .max_tokens = 64};
    struct answer answer = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, false, EVALRT_OK};
    error = evalrt_submit(runtime, &request, on_event, &answer, NULL);
    if (error) {
        evalrt_release(runtime);
        return fail(error);
    }
    pthread_mutex_lock(&answer.mutex);
    while (!answer.done) pthread_cond_wait(&answer.changed, &answer.mutex);
    pthread_mutex_unlock(&answer.mutex);
    evalrt_release(runtime);
    return answer.code == EVALRT_OK ? 0 : 1;
}
