/* The C interface, used as a C program uses it. Each test's name is what must be true. */
#define _DEFAULT_SOURCE
#define _DARWIN_C_SOURCE
#include <evalrt.h>

#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define CHECK(what)                                  \
    do {                                             \
        if (!(what)) die(__FILE__, __LINE__, #what); \
    } while (0)

static const char* running_test = "";
static char log_path[] = "/tmp/evalrt-capi-XXXXXX"; /* what the fake server was asked */

static void die(const char* file, int line, const char* what) {
    fprintf(stderr, "%s:%d: not true: %s\n  in the test: %s\n", file, line, what, running_test);
    unlink(log_path);
    exit(1);
}

/* Owns what it compares with: frees the error. */
static void check_error(int line, evalrt_error* error, evalrt_code code, const char* words) {
    const char* message = evalrt_error_message(error);
    if (evalrt_error_code(error) != code || !strstr(message, words)) {
        fprintf(stderr, "code %d: %s\n", (int)evalrt_error_code(error), message);
        die(__FILE__, line, words);
    }
    evalrt_error_free(error);
}
#define CHECK_ERROR(error, code, words) check_error(__LINE__, error, code, words)
#define CHECK_OK(error) check_error(__LINE__, error, EVALRT_OK, "no error")

/* What it writes to stdout. */
static void read_all(FILE* file, char (*text)[2000]) {
    (*text)[fread(*text, 1, sizeof *text - 1, file)] = 0;
}

/* One request and all that is told of it. */
typedef struct Call {
    evalrt_runtime* runtime;
    evalrt_id id;
    int texts, done;
    evalrt_code code;
    evalrt_event last;
    char message[2000], pieces[2000], text[2000], response[2000];
    void (*then)(struct Call* call); /* in the callback of EVALRT_DONE */
    struct Call* next;
} Call;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static int inside; /* callbacks that run; only for tests with one runtime */

static void keep(char (*to)[2000], const char* text) { snprintf(*to, sizeof *to, "%s", text); }

static void on_event(void* user, const evalrt_event* event) {
    Call* call = user;
    CHECK(__atomic_add_fetch(&inside, 1, __ATOMIC_SEQ_CST) == 1);
    CHECK(event->struct_size == sizeof(evalrt_event));
    CHECK(event->id != 0 && event->id == call->id);
    CHECK(strlen(event->text) == event->text_size);
    CHECK(call->done == 0);
    if (event->kind == EVALRT_TEXT) {
        CHECK(event->text_size > 0 && !event->error && !event->response_json);
        ++call->texts;
        strncat(call->pieces, event->text, sizeof call->pieces - strlen(call->pieces) - 1);
        __atomic_sub_fetch(&inside, 1, __ATOMIC_SEQ_CST);
        return;
    }
    CHECK(event->kind == EVALRT_DONE);
    call->last = *event;
    call->code = evalrt_error_code(event->error);
    keep(&call->message, evalrt_error_message(event->error));
    keep(&call->text, event->text);
    if (event->response_json) {
        CHECK(strlen(event->response_json) == event->response_json_size);
        keep(&call->response, event->response_json);
    }
    __atomic_sub_fetch(&inside, 1, __ATOMIC_SEQ_CST);
    if (call->then) call->then(call);
    pthread_mutex_lock(&mutex);
    ++call->done;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&mutex);
}

static void wait_for(Call* call) {
    pthread_mutex_lock(&mutex);
    while (!call->done) pthread_cond_wait(&changed, &mutex);
    pthread_mutex_unlock(&mutex);
}

static evalrt_config with_server(const char* model) {
    evalrt_config config = {.struct_size = sizeof config,
                            .backend = "mlx-server",
                            .model = model,
                            .executable = FAKE_SERVER};
    return config;
}

static evalrt_runtime* open_with(evalrt_config config) {
    evalrt_runtime* runtime = NULL;
    CHECK_OK(evalrt_open(&config, &runtime));
    CHECK(runtime);
    return runtime;
}

static evalrt_runtime* open_server(void) { return open_with(with_server("small")); }

/* A chat of one question, which needs no escapes. */
static evalrt_error* ask(Call* call, const char* question, evalrt_request request) {
    char messages[300];
    snprintf(messages, sizeof messages, "[{\"role\": \"user\", \"content\": \"%s\"}]", question);
    request.struct_size = sizeof request;
    request.messages_json = messages;
    return evalrt_submit(call->runtime, &request, on_event, call, &call->id);
}

static void submit(Call* call, const char* question) {
    CHECK_OK(ask(call, question, (evalrt_request){0}));
    CHECK(call->id != 0);
}

/* The lines of the fake server's log since the last asked(). */
static char* log_so_far(void) {
    static char text[200000];
    FILE* file = fopen(log_path, "r");
    CHECK(file);
    text[fread(text, 1, sizeof text - 1, file)] = 0;
    fclose(file);
    return text;
}

/* The same, and begins anew: nothing may be on its way. */
static char* asked(void) {
    char* text = log_so_far();
    CHECK(truncate(log_path, 0) == 0);
    return text;
}

static void answer_with_figures(void) {
    evalrt_runtime* runtime = open_server();
    CHECK(evalrt_abi() == EVALRT_ABI);
    CHECK(strncmp(evalrt_url(runtime), "http://127.0.0.1:", 17) == 0);
    CHECK(strcmp(evalrt_url(runtime) + strlen(evalrt_url(runtime)) - 3, "/v1") == 0);
    CHECK(strcmp(evalrt_model(runtime), "default_model") == 0);
    CHECK(evalrt_running(runtime));
    Call call = {.runtime = runtime};
    submit(&call, "hello");
    wait_for(&call);
    CHECK(call.code == EVALRT_OK && strcmp(call.message, "no error") == 0);
    CHECK(call.texts == 0);
    CHECK(strcmp(call.text, "answer to hello ") == 0);
    CHECK(call.last.http_status == 200 && call.last.attempts == 1);
    CHECK(call.last.prompt_tokens == 40 && call.last.cached_tokens == 20);
    CHECK(call.last.completion_tokens == 3);
    CHECK(call.last.queued_ms >= 0 && call.last.first_text_ms >= 0);
    CHECK(call.last.total_ms >= call.last.first_text_ms);
    CHECK(strstr(call.response, "\"answer to hello \""));
    evalrt_close(runtime);
    CHECK(!evalrt_running(runtime));
    CHECK(strncmp(evalrt_url(runtime), "http://127.0.0.1:", 17) == 0);
    evalrt_release(runtime);
}

static void pieces_add_up(void) {
    Call call = {.runtime = open_server()};
    CHECK_OK(ask(&call, "one two three", (evalrt_request){.stream = true}));
    wait_for(&call);
    CHECK(call.code == EVALRT_OK && call.texts > 1);
    CHECK(strcmp(call.pieces, call.text) == 0 && call.text[0]);
    evalrt_release(call.runtime);
}

static void bodies(void) {
    Call call = {.runtime = open_server()};
    asked();
    evalrt_request request = {.struct_size = sizeof request,
                              .prompt = "say \"h\xc3\xa4\"\n",
                              .extra_json = "{\"stop\": [\"x\"], \"max_tokens\": 9}",
                              .max_tokens = 5,
                              .temperature = 0.25,
                              .session = "s",
                              .turn = 3};
    CHECK_OK(evalrt_submit(call.runtime, &request, on_event, &call, &call.id));
    wait_for(&call);
    const char* log = asked();
    CHECK(strstr(log, "\"path\": \"/v1/completions\""));
    CHECK(strstr(log, "\"prompt\": \"say \\\"h\\u00e4\\\"\\n\", \"temperature\": 0.25, "
                      "\"max_tokens\": 9, \"stop\": [\"x\"]"));

    Call chat = {.runtime = call.runtime};
    CHECK_OK(ask(&chat, "hi", (evalrt_request){.max_tokens = 7}));
    wait_for(&chat);
    log = asked();
    CHECK(strstr(log, "\"path\": \"/v1/chat/completions\""));
    CHECK(strstr(log, "{\"messages\": [{\"role\": \"user\", \"content\": \"hi\"}], "
                      "\"temperature\": 0, \"max_tokens\": 7, "));

    Call raw = {.runtime = call.runtime};
    request = (evalrt_request){
        .struct_size = sizeof request,
        .body_json = "{\"new_field\": [1.50], \"messages\": [{\"content\": \"raw\"}]}"};
    CHECK_OK(evalrt_submit(raw.runtime, &request, on_event, &raw, &raw.id));
    wait_for(&raw);
    CHECK(raw.code == EVALRT_OK);
    CHECK(strstr(asked(), "{\"new_field\": [1.5], \"messages\": [{\"content\": \"raw\"}], "));

    Call old = {.runtime = call.runtime};
    request = (evalrt_request){.struct_size = sizeof request,
                               .body_json = "{\"prompt\": \"p\"}",
                               .endpoint = "/v1/completions"};
    CHECK_OK(evalrt_submit(old.runtime, &request, on_event, &old, &old.id));
    wait_for(&old);
    CHECK(strstr(asked(), "\"path\": \"/v1/completions\", \"body\": {\"prompt\": \"p\""));

    Call message = {.runtime = call.runtime};
    request = (evalrt_request){
        .struct_size = sizeof request,
        .body_json =
            "{\"max_tokens\": 5, \"messages\": [{\"role\": \"user\", \"content\": \"m\"}]}",
        .endpoint = "/v1/messages"};
    CHECK_OK(evalrt_submit(message.runtime, &request, on_event, &message, &message.id));
    wait_for(&message);
    CHECK(message.code == EVALRT_OK);
    CHECK(strstr(message.response, "\"type\": \"message\""));
    evalrt_release(call.runtime);
}

static void failures(void) {
    evalrt_runtime* runtime = open_server();
    Call refused = {.runtime = runtime};
    submit(&refused, "fail");
    wait_for(&refused);
    CHECK(refused.code == EVALRT_REJECTED && refused.last.http_status == 400);
    CHECK(strstr(refused.message, "this one is refused"));
    CHECK(strstr(refused.response, "this one is refused"));
    CHECK(refused.last.prompt_tokens == -1 && refused.last.cached_tokens == -1);
    CHECK(refused.last.first_text_ms == -1);

    Call late = {.runtime = runtime};
    CHECK_OK(ask(&late, "hold", (evalrt_request){.timeout_ms = 50}));
    wait_for(&late);
    CHECK(late.code == EVALRT_TIMED_OUT);

    Call last = {.runtime = runtime};
    submit(&last, "die");
    wait_for(&last);
    CHECK(last.code == EVALRT_POISON && strstr(last.message, "twice"));
    while (!evalrt_running(runtime)) usleep(1000); /* without another request */
    Call after = {.runtime = runtime};
    submit(&after, "anyone there?");
    wait_for(&after);
    CHECK(after.code == EVALRT_OK && evalrt_running(runtime));
    evalrt_release(runtime);
}

enum { many = 200 };
typedef enum When { at_once, in_the_middle, when_all_is_done } When;

static void two_hundred(When when) {
    static Call calls[many];
    memset(calls, 0, sizeof calls);
    evalrt_runtime* runtime = open_server();
    for (int i = 0; i < many; ++i) {
        calls[i].runtime = runtime;
        CHECK_OK(
            ask(&calls[i], i % 5 ? "quick" : "sleep 0.05", (evalrt_request){.stream = i % 2 == 0}));
        if (i % 3 == 0) evalrt_cancel(runtime, calls[i].id);
    }
    if (when == in_the_middle) wait_for(&calls[many / 10 * 3 + 1]);
    if (when == when_all_is_done)
        for (int i = 0; i < many; ++i) wait_for(&calls[i]);
    evalrt_close(runtime);
    int done = 0, answered = 0;
    for (int i = 0; i < many; ++i) { /* nothing writes any more: no lock */
        CHECK(calls[i].done == 1);
        done += calls[i].done;
        answered += calls[i].code == EVALRT_OK;
        CHECK(calls[i].code == EVALRT_OK || calls[i].code == EVALRT_CANCELLED);
        if (when == when_all_is_done && i % 3) CHECK(calls[i].code == EVALRT_OK);
    }
    CHECK(done == many);
    CHECK(when == at_once || answered > 0);
    evalrt_release(runtime);
}

static void close_at_once(void) { two_hundred(at_once); }
static void close_in_the_middle(void) { two_hundred(in_the_middle); }
static void close_when_done(void) { two_hundred(when_all_is_done); }

static int count_of(const char* text, const char* words) {
    int count = 0;
    for (; (text = strstr(text, words)); ++text) ++count;
    return count;
}

static void close_running(void) {
    static Call calls[many];
    memset(calls, 0, sizeof calls);
    evalrt_config config = with_server("small");
    config.max_in_flight = many;
    evalrt_runtime* runtime = open_with(config);
    asked();
    for (int i = 0; i < many; ++i) {
        calls[i].runtime = runtime;
        submit(&calls[i], "hold");
    }
    while (count_of(log_so_far(), "\"hold\"") < many) usleep(1000);
    evalrt_close(runtime);
    for (int i = 0; i < many; ++i) CHECK(calls[i].done == 1 && calls[i].code == EVALRT_CANCELLED);
    evalrt_release(runtime);
}

static void* closer(void* runtime) {
    evalrt_close(runtime);
    return NULL;
}

enum { workers = 4, each = 50 };
typedef struct Worker {
    pthread_t thread;
    evalrt_runtime* runtime;
    bool until_closed;
    int accepted;
    Call calls[each];
} Worker;

static void* work(void* user) {
    Worker* worker = user;
    for (int i = 0; i < each; ++i) {
        Call* call = &worker->calls[i];
        call->runtime = worker->runtime;
        evalrt_error* error = ask(call, i % 7 ? "quick" : "sleep 0.02", (evalrt_request){0});
        if (error) {
            CHECK(worker->until_closed);
            CHECK_ERROR(error, EVALRT_CANCELLED, "the runtime is closed");
            break;
        }
        ++worker->accepted;
        if (i % 3 == 0) evalrt_cancel(worker->runtime, call->id);
        if (i % 10 == 0) {
            char* text;
            CHECK_OK(evalrt_summary(worker->runtime, &text));
            evalrt_string_free(text);
        }
        CHECK(evalrt_url(worker->runtime)[0] && evalrt_model(worker->runtime)[0]);
        evalrt_running(worker->runtime);
        if (worker->until_closed) usleep(1000);
    }
    return NULL;
}

static void from_threads(bool closed_meanwhile) {
    static Worker all[workers];
    memset(all, 0, sizeof all);
    evalrt_runtime* runtime = open_server();
    for (int i = 0; i < workers; ++i) {
        all[i].runtime = runtime;
        all[i].until_closed = closed_meanwhile;
        CHECK(pthread_create(&all[i].thread, NULL, work, &all[i]) == 0);
    }
    if (closed_meanwhile) {
        usleep(20000);
        evalrt_close(runtime);
    }
    for (int i = 0; i < workers; ++i) {
        pthread_join(all[i].thread, NULL);
        for (int k = 0; k < all[i].accepted; ++k) {
            Call* call = &all[i].calls[k];
            if (!closed_meanwhile) wait_for(call);
            CHECK(call->done == 1);
            CHECK(call->code == EVALRT_CANCELLED ? closed_meanwhile || k % 3 == 0
                                                 : call->code == EVALRT_OK);
        }
        CHECK(closed_meanwhile || all[i].accepted == each);
    }
    evalrt_release(runtime);
}

static void all_from_threads(void) { from_threads(false); }
static void close_beside_threads(void) { from_threads(true); }

static void close_from_threads(void) {
    static Call calls[20];
    memset(calls, 0, sizeof calls);
    evalrt_runtime* runtime = open_server();
    for (int i = 0; i < 20; ++i) {
        calls[i].runtime = runtime;
        submit(&calls[i], "hold");
    }
    pthread_t threads[4];
    for (int i = 0; i < 4; ++i) CHECK(pthread_create(&threads[i], NULL, closer, runtime) == 0);
    evalrt_close(runtime);
    for (int i = 0; i < 20; ++i) CHECK(calls[i].done == 1 && calls[i].code == EVALRT_CANCELLED);
    for (int i = 0; i < 4; ++i) pthread_join(threads[i], NULL);
    evalrt_close(runtime);
    evalrt_release(runtime);
}

static void then_close(Call* call) {
    evalrt_close(call->runtime);
    evalrt_close(call->runtime);
    CHECK(!evalrt_running(call->runtime));
    CHECK_ERROR(ask(call->next, "too late", (evalrt_request){0}), EVALRT_CANCELLED, "closed");
}

static void close_in_callback(void) {
    evalrt_runtime* runtime = open_server();
    Call never = {.runtime = runtime}, waits = {.runtime = runtime};
    Call first = {.runtime = runtime, .then = then_close, .next = &never};
    submit(&first, "quick");
    submit(&waits, "hold");
    wait_for(&waits);
    CHECK(first.code == EVALRT_OK && waits.code == EVALRT_CANCELLED && !never.done);
    evalrt_release(runtime);
}

static int entries(const char* folder) {
    DIR* dir = opendir(folder);
    if (!dir) return -1; /* not on this system */
    int count = 0;
    while (readdir(dir)) ++count;
    closedir(dir);
    return count;
}

/* Nothing left: no descriptor, thread or child process more than `before`. What was released in a
 * callback ends a moment later. */
typedef struct Left {
    int fds, threads;
} Left;
static Left left(void) { return (Left){entries("/dev/fd"), entries("/proc/self/task")}; }

static void check_nothing_left(Left before) {
    for (int tries = 0;; ++tries) {
        const Left now = left();
        if (now.fds == before.fds && now.threads == before.threads) break;
        if (tries == 30000)
            fprintf(stderr, "descriptors %d, then %d; threads %d, then %d\n", before.fds, now.fds,
                    before.threads, now.threads);
        CHECK(tries < 30000);
        usleep(10000);
    }
    CHECK(waitpid(-1, NULL, WNOHANG) == -1 && errno == ECHILD);
}

static void then_release(Call* call) { evalrt_release(call->runtime); }

static void release_in_callback(void) {
    const Left before = left();
    evalrt_runtime* runtime = open_server();
    Call first = {.runtime = runtime, .then = then_release}, waits = {.runtime = runtime};
    submit(&waits, "hold");
    submit(&first, "quick");
    wait_for(&first);
    wait_for(&waits);
    CHECK(first.code == EVALRT_OK && waits.code == EVALRT_CANCELLED);
    check_nothing_left(before);

    Call only = {.runtime = open_server(), .then = then_release};
    submit(&only, "quick");
    wait_for(&only);
    check_nothing_left(before);
}

static void then_ask(Call* call) {
    if (!call->next) return;
    submit(call->next, call->next->next ? "quick" : "hold");
    if (!call->next->next) evalrt_cancel(call->runtime, call->next->id);
}

static void submit_in_callback(void) {
    evalrt_runtime* runtime = open_server();
    Call calls[4];
    memset(calls, 0, sizeof calls);
    for (int i = 0; i < 4; ++i) {
        calls[i].runtime = runtime;
        calls[i].then = then_ask;
        if (i < 3) calls[i].next = &calls[i + 1];
    }
    submit(&calls[0], "quick");
    wait_for(&calls[3]);
    for (int i = 0; i < 3; ++i) CHECK(calls[i].done == 1 && calls[i].code == EVALRT_OK);
    CHECK(calls[3].code == EVALRT_CANCELLED);
    evalrt_release(runtime);
}

static void then_cancel(Call* call) { evalrt_cancel(call->runtime, call->id); }

static void cancel_too_late(void) {
    evalrt_runtime* runtime = open_server();
    Call first = {.runtime = runtime, .then = then_cancel}, second = {.runtime = runtime};
    evalrt_cancel(runtime, 1);
    evalrt_cancel(runtime, 0);
    submit(&first, "quick");
    wait_for(&first);
    evalrt_cancel(runtime, first.id);
    evalrt_cancel(runtime, 999999);
    submit(&second, "quick");
    wait_for(&second);
    CHECK(first.code == EVALRT_OK && second.code == EVALRT_OK && second.id != first.id);
    evalrt_close(runtime);
    evalrt_cancel(runtime, first.id);
    CHECK(first.done == 1 && second.done == 1);
    evalrt_release(runtime);
}

static void submit_after_close(void) {
    Call call = {.runtime = open_server(), .id = 77};
    evalrt_close(call.runtime);
    CHECK_ERROR(ask(&call, "late", (evalrt_request){0}), EVALRT_CANCELLED, "the runtime is closed");
    CHECK(call.id == 0 && call.done == 0);
    evalrt_release(call.runtime);
}

/* Where nobody answers yet. */
static int listener(char (*url)[60]) {
    const int server = socket(AF_INET, SOCK_STREAM, 0);
    struct sockaddr_in place = {.sin_family = AF_INET,
                                .sin_addr = {.s_addr = htonl(INADDR_LOOPBACK)}};
    socklen_t size = sizeof place;
    CHECK(bind(server, (struct sockaddr*)&place, size) == 0 && listen(server, 8) == 0);
    CHECK(getsockname(server, (struct sockaddr*)&place, &size) == 0);
    snprintf(*url, sizeof *url, "http://127.0.0.1:%d/v1", ntohs(place.sin_port));
    return server;
}

static bool somebody_asks(int server) {
    struct pollfd waiting = {.fd = server, .events = POLLIN};
    return poll(&waiting, 1, 0) > 0;
}

/* What is asked next; it gets this answer. */
static const char* answer_one(int server, const char* answer) {
    static char text[10000];
    const int client = accept(server, NULL, NULL);
    CHECK(client >= 0);
    size_t size = 0, whole = sizeof text - 1;
    while (size < whole) {
        const ssize_t more = read(client, text + size, sizeof text - 1 - size);
        CHECK(more > 0);
        text[size += (size_t)more] = 0;
        const char* body = strstr(text, "\r\n\r\n");
        const char* length = strstr(text, "Content-Length: ");
        if (body && length) whole = (size_t)(body + 4 - text) + (size_t)atol(length + 16);
    }
    dprintf(client,
            "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %zu\r\n"
            "Connection: close\r\n\r\n%s",
            strlen(answer), answer);
    close(client);
    return text;
}

static void check_open(int line, evalrt_config config, evalrt_code code, const char* words) {
    evalrt_runtime* runtime = (evalrt_runtime*)&config; /* must be overwritten */
    check_error(line, evalrt_open(&config, &runtime), code, words);
    CHECK(!runtime);
}
#define CHECK_OPEN(config, code, words) check_open(__LINE__, config, code, words)

static void open_errors(void) {
    const Left before = left();
    evalrt_config config = with_server("small");
    config.backend = "nosuch";
    CHECK_OPEN(config, EVALRT_INVALID, "unknown backend 'nosuch'");
    CHECK_OPEN(config, EVALRT_INVALID, "mlx-server");
    CHECK_OPEN(with_server(NULL), EVALRT_INVALID, "no model");
    CHECK_OPEN(with_server("dies-while-loading"), EVALRT_EXITED, "no such model in this folder");
    CHECK_OPEN(with_server("wrong-key"), EVALRT_AUTH, "Incorrect API key");
    config = with_server("small");
    config.executable = "/no/such/program";
    CHECK_OPEN(config, EVALRT_EXITED, "cannot start '/no/such/program'");
    config = with_server("small");
    config.port = 65536;
    CHECK_OPEN(config, EVALRT_INVALID, "65536");
    config = with_server("small");
    config.order = "best";
    CHECK_OPEN(config, EVALRT_INVALID, "\"best\"; known are planned and fifo");
    config = with_server("small");
    config.wire = "soap";
    CHECK_OPEN(config, EVALRT_INVALID, "\"soap\"; known are openai and anthropic");
    config = with_server("small");
    config.gateway_port = 8080;
    CHECK_OPEN(config, EVALRT_INVALID, "go with gateway");
    config.gateway = true;
    config.gateway_token = "a b";
    CHECK_OPEN(config, EVALRT_INVALID, "gateway_token");
    config.gateway_token = ""; /* as from a variable that is not set: not open to all */
    CHECK_OPEN(config, EVALRT_INVALID, "gateway_token is empty");
    config.gateway_token = NULL;
    config.gateway_port = 65536;
    CHECK_OPEN(config, EVALRT_INVALID, "gateway_port is 65536");
    config = (evalrt_config){
        .struct_size = sizeof config, .backend = "openai-url", .url = "http://127.0.0.1:1/v1"};
    CHECK_OPEN(config, EVALRT_UNREACHABLE, "127.0.0.1:1");
    config.url = "ftp://x";
    CHECK_OPEN(config, EVALRT_INVALID, "http://");
    config.url = NULL;
    CHECK_OPEN(config, EVALRT_INVALID, "address of a running server");
    config = with_server("small");
    const char* no_arguments[] = {"--no-such-option", NULL};
    config.server_args = no_arguments;
    CHECK_OPEN(config, EVALRT_EXITED, "--no-such-option");
    char url[60];
    const int taken = listener(&url);
    config = with_server("small");
    config.gateway = true;
    config.gateway_port = (uint32_t)atoi(strrchr(url, ':') + 1);
    CHECK_OPEN(config, EVALRT_INVALID, "the gateway: ");
    close(taken);
    check_nothing_left(before);
}

static void check_submit(int line, evalrt_runtime* runtime, evalrt_request request,
                         const char* words) {
    evalrt_id id = 5;
    request.struct_size = sizeof request;
    check_error(line, evalrt_submit(runtime, &request, on_event, NULL, &id), EVALRT_INVALID, words);
    CHECK(id == 0);
}
#define CHECK_SUBMIT(words, ...) \
    check_submit(__LINE__, runtime, (evalrt_request){__VA_ARGS__}, words)

static void nonsense(void) {
    evalrt_runtime* runtime = open_server();
    CHECK_SUBMIT("none of prompt, messages_json and body_json", .max_tokens = 1);
    CHECK_SUBMIT("more than one", .prompt = "p", .messages_json = "[]");
    CHECK_SUBMIT("more than one", .messages_json = "[]", .body_json = "{}");
    CHECK_SUBMIT("messages_json is not JSON: there has to be a string in double quotes, at byte 3",
                 .messages_json = "[{]");
    CHECK_SUBMIT("messages_json is not JSON", .messages_json = "");
    CHECK_SUBMIT("not a JSON array", .messages_json = "{\"role\": \"user\"}");
    CHECK_SUBMIT("not a JSON array", .messages_json = "[], \"model\": \"other\"");
    CHECK_SUBMIT("messages_json is not JSON", .messages_json = "[]}, {\"x\": []");
    CHECK_SUBMIT("extra_json is not JSON", .prompt = "p", .extra_json = "{");
    CHECK_SUBMIT("extra_json is not a JSON object", .prompt = "p", .extra_json = "[]");
    CHECK_SUBMIT("\"prompt\" once more", .prompt = "p", .extra_json = "{\"prompt\": \"q\"}");
    CHECK_SUBMIT("body_json is not a JSON object", .body_json = "7");
    CHECK_SUBMIT("body_json is not JSON", .body_json = "{\"a\" 7}");
    CHECK_SUBMIT("write them into body_json", .body_json = "{}", .max_tokens = 5);
    CHECK_SUBMIT("write them into body_json", .body_json = "{}", .temperature = 0.5);
    CHECK_SUBMIT("the endpoint goes with body_json", .prompt = "p", .endpoint = "/v1/completions");
    CHECK_SUBMIT("the endpoint is \"/v2\"", .body_json = "{}", .endpoint = "/v2");
    CHECK_SUBMIT("the endpoint is \"\"", .body_json = "{}", .endpoint = "");
    CHECK_SUBMIT("not UTF-8", .prompt = "\xff");
    CHECK_SUBMIT("the temperature is no number", .prompt = "p", .temperature = strtod("nan", NULL));
    CHECK_SUBMIT("the turn", .prompt = "p", .turn = 4000000000u);

    /* By way of variables: the compiler knows that some of these must not be NULL. */
    evalrt_runtime* no_runtime = NULL;
    evalrt_event_fn no_function = NULL;
    const evalrt_request* no_request = NULL;
    const evalrt_config* no_config = NULL;
    evalrt_runtime** nowhere = NULL;
    char** no_text = NULL;
    evalrt_request good = {.struct_size = sizeof good, .prompt = "p"};
    evalrt_config config = with_server("small");
    CHECK_ERROR(evalrt_open(no_config, &no_runtime), EVALRT_INVALID, "evalrt_config is NULL");
    CHECK_ERROR(evalrt_open(&config, nowhere), EVALRT_INVALID, "out is NULL");
    CHECK_ERROR(evalrt_submit(no_runtime, &good, on_event, NULL, NULL), EVALRT_INVALID, "NULL");
    CHECK_ERROR(evalrt_submit(runtime, no_request, on_event, NULL, NULL), EVALRT_INVALID, "NULL");
    CHECK_ERROR(evalrt_submit(runtime, &good, no_function, NULL, NULL), EVALRT_INVALID, "NULL");
    CHECK_ERROR(evalrt_summary(runtime, no_text), EVALRT_INVALID, "out is NULL");
    char* text = (char*)&config;
    CHECK_ERROR(evalrt_summary(no_runtime, &text), EVALRT_INVALID, "runtime is NULL");
    CHECK(!text);
    evalrt_close(NULL);
    evalrt_release(NULL);
    evalrt_cancel(no_runtime, 1);
    evalrt_error_free(NULL);
    evalrt_string_free(NULL);
    CHECK(!evalrt_running(no_runtime));
    CHECK(strcmp(evalrt_url(no_runtime), "") == 0 && strcmp(evalrt_model(no_runtime), "") == 0);
    evalrt_release(runtime);
}

static void struct_sizes(void) {
    evalrt_runtime* runtime = open_server();
    evalrt_config config = with_server("small");
    config.struct_size = 0;
    CHECK_OPEN(config, EVALRT_INVALID, "set it to sizeof(evalrt_config)");
    config.struct_size = sizeof config + 8;
    CHECK_OPEN(config, EVALRT_INVALID, "older than the evalrt.h that you compile with");
    config.struct_size = sizeof config - 1;
    CHECK_OPEN(config, EVALRT_INVALID, "set it to sizeof(evalrt_config)");
    evalrt_request request = {.prompt = "p"};
    CHECK_ERROR(evalrt_submit(runtime, &request, on_event, NULL, NULL), EVALRT_INVALID,
                "set it to sizeof(evalrt_request)");
    request.struct_size = (size_t)-8;
    CHECK_ERROR(evalrt_submit(runtime, &request, on_event, NULL, NULL), EVALRT_INVALID,
                "install both from one version");
    evalrt_release(runtime);
}

static void on_log(void* user, const char* line) {
    pthread_mutex_lock(&mutex);
    strncat(user, line, 1000);
    pthread_mutex_unlock(&mutex);
}

static void log_lines(void) {
    char lines[2000] = "";
    evalrt_config config = with_server("small");
    config.on_log = on_log;
    config.log_user = lines;
    Call call = {.runtime = open_with(config)}, again = {.runtime = call.runtime};
    CHECK_OK(ask(&call, "hi", (evalrt_request){.extra_json = "{\"seed\": 7}"}));
    CHECK_OK(ask(&again, "hi", (evalrt_request){.extra_json = "{\"seed\": 7}"}));
    wait_for(&call);
    wait_for(&again);
    evalrt_close(call.runtime);
    CHECK(strstr(lines, "dropped \"seed\"") == lines && !strstr(lines + 1, "dropped"));
    evalrt_release(call.runtime);
}

static void check_summary(evalrt_runtime* runtime, const char* const* members) {
    char* text = NULL;
    CHECK_OK(evalrt_summary(runtime, &text));
    CHECK(text[0] == '{' && text[strlen(text) - 1] == '}');
    for (; *members; ++members) {
        if (!strstr(text, *members)) fprintf(stderr, "%s\n", text);
        CHECK(strstr(text, *members));
    }
    evalrt_string_free(text);
}

static void summary(void) {
    evalrt_config config = with_server("small");
    config.max_in_flight = 3;
    config.order = "fifo";
    Call calls[4];
    memset(calls, 0, sizeof calls);
    evalrt_runtime* runtime = open_with(config);
    const char* empty[] = {"\"requests\":0", "\"wall_seconds\":0", "\"prompt_tokens\":null", NULL};
    check_summary(runtime, empty);
    for (int i = 0; i < 4; ++i) {
        calls[i].runtime = runtime;
        submit(&calls[i], i < 2 ? "hi" : i == 2 ? "fail" : "hold");
    }
    for (int i = 0; i < 3; ++i) wait_for(&calls[i]);
    const char* so_far[] = {"\"backend\":\"mlx-server\"",
                            "\"model\":\"default_model\"",
                            "\"order\":\"fifo\"",
                            "\"max_in_flight\":3",
                            "\"requests\":3",
                            "\"answered\":2",
                            "\"failures\":{\"rejected\":1}",
                            "\"actual\":40",
                            "\"prompt_tokens\":80",
                            NULL};
    check_summary(runtime, so_far);
    evalrt_close(runtime);
    const char* at_the_end[] = {"\"requests\":4", "\"answered\":2", "\"not_run\":1", NULL};
    check_summary(runtime, at_the_end);
    evalrt_release(runtime);
}

static bool summary_has(evalrt_runtime* runtime, const char* words) {
    char* text = NULL;
    CHECK_OK(evalrt_summary(runtime, &text));
    const bool has = strstr(text, words);
    evalrt_string_free(text);
    return has;
}

static void summary_of_one_at_a_time(void) {
    Call calls[12];
    memset(calls, 0, sizeof calls);
    evalrt_config config = with_server("small");
    config.max_in_flight = 6;
    evalrt_runtime* runtime = open_with(config);
    for (int i = 0; i < 12; ++i) {
        calls[i].runtime = runtime;
        submit(&calls[i], "alone");
    }
    for (int i = 0; i < 12; ++i) wait_for(&calls[i]);
    CHECK(summary_has(runtime, "mlx-server answers one request at a time: "));
    evalrt_close(runtime);
    CHECK(summary_has(runtime, "answers one request at a time"));
    evalrt_release(runtime);
    runtime = open_with(config);
    for (int i = 0; i < 12; ++i) {
        calls[i] = (Call){.runtime = runtime};
        submit(&calls[i], "quick");
    }
    for (int i = 0; i < 12; ++i) wait_for(&calls[i]);
    CHECK(!summary_has(runtime, "answers one request at a time"));
    evalrt_release(runtime);
}

static void summary_of_restarts(void) {
    Call call = {.runtime = open_server()};
    submit(&call, "die");
    wait_for(&call);
    /* Without another request. */
    while (!summary_has(call.runtime, "\"server_restarts\":2")) usleep(1000);
    const char* rest[] = {"\"failures\":{\"poison\":1}", "Segmentation fault in the engine",
                          "\"prefix_cached\":\"prefix cached: n/a", NULL};
    check_summary(call.runtime, rest);
    CHECK(evalrt_running(call.runtime));
    evalrt_close(call.runtime);
    check_summary(call.runtime, rest);
    evalrt_release(call.runtime);
}

static void journal(void) {
    char path[] = "/tmp/evalrt-journal-XXXXXX";
    CHECK(mkdtemp(path));
    char file[60];
    snprintf(file, sizeof file, "%s/journal", path);
    evalrt_config config = with_server("small");
    config.journal = file;
    Call first = {.runtime = open_with(config)}, fails = {.runtime = first.runtime};
    CHECK_OK(ask(&first, "one", (evalrt_request){.name = "the first"}));
    submit(&fails, "fail");
    wait_for(&first);
    wait_for(&fails);
    CHECK(first.code == EVALRT_OK && fails.code == EVALRT_REJECTED);
    CHECK_OPEN(config, EVALRT_JOURNAL, "in use by the process");
    evalrt_release(first.runtime);

    asked();
    Call again = {.runtime = open_with(config)}, second = {.runtime = again.runtime};
    submit(&again, "one");
    submit(&second, "two");
    wait_for(&again);
    wait_for(&second);
    CHECK(again.code == EVALRT_OK && strcmp(again.text, first.text) == 0);
    CHECK(again.last.http_status == 200);
    const char* log = asked();
    CHECK(strstr(log, "\"two\"") && !strstr(log, "\"one\""));
    const char* held[] = {"\"answered\":2", "\"from_journal\":1", NULL};
    check_summary(again.runtime, held);
    evalrt_release(again.runtime);

    /* The disk is full, as it were. */
    Call lost = {.runtime = open_with(config)}, late = {.runtime = lost.runtime};
    struct rlimit limit, none;
    CHECK(getrlimit(RLIMIT_FSIZE, &limit) == 0);
    none = limit;
    none.rlim_cur = 1;
    signal(SIGXFSZ, SIG_IGN);
    CHECK(setrlimit(RLIMIT_FSIZE, &none) == 0);
    submit(&lost, "three");
    wait_for(&lost);
    submit(&late, "four");
    wait_for(&late);
    CHECK(setrlimit(RLIMIT_FSIZE, &limit) == 0);
    CHECK(lost.code == EVALRT_JOURNAL && strstr(lost.message, file));
    CHECK(late.code == EVALRT_JOURNAL);
    evalrt_release(lost.runtime);

    config.max_context = 77;
    CHECK_OPEN(config, EVALRT_JOURNAL, "max_context was \"4096\"");
    config.journal = "/no/such/folder/journal";
    CHECK_OPEN(config, EVALRT_JOURNAL, "/no/such/folder");
    snprintf(file, sizeof file, "rm -r %s", path);
    CHECK(system(file) == 0);
}

static void gateway(void) {
    const Left before = left();
    evalrt_config config = with_server("small");
    config.gateway = true;
    config.gateway_token = "secret";
    config.max_in_flight = 2;
    Call call = {.runtime = open_with(config)};
    const char* url = evalrt_url(call.runtime);
    CHECK(strncmp(url, "http://127.0.0.1:", 17) == 0 && strcmp(url + strlen(url) - 3, "/v1") == 0);
    asked();
    submit(&call, "meet 2"); /* answered when there is another beside it */
    char command[1000], answers[2000];
    snprintf(command, sizeof command, CLIENT " %s secret one two fail 'sleep 0.1'", url);
    FILE* client = popen(command, "r");
    read_all(client, &answers);
    CHECK(pclose(client) == 0);
    CHECK(strcmp(answers, "answer to one \nanswer to two \nHTTP 400\nanswer to sleep 0.1 \n") == 0);
    wait_for(&call);
    CHECK(call.code == EVALRT_OK);
    const char* log = asked();
    CHECK(!strstr(log, "of the client's own") && count_of(log, "\"default_model\"") == 5);
    CHECK(strstr(log, "\"in_flight\": 2") && !strstr(log, "\"in_flight\": 3"));
    const char* both[] = {"\"requests\":5", "\"answered\":4", "\"failures\":{\"rejected\":1}",
                          NULL};
    check_summary(call.runtime, both);

    snprintf(command, sizeof command, CLIENT " %s wrong one", url);
    client = popen(command, "r");
    read_all(client, &answers);
    CHECK(pclose(client) == 0 && strcmp(answers, "HTTP 401\n") == 0);

    /* Closing ends its requests, too. */
    snprintf(command, sizeof command, CLIENT " %s secret hold", url);
    client = popen(command, "r");
    while (!strstr(log_so_far(), "\"hold\"")) usleep(1000);
    evalrt_close(call.runtime);
    read_all(client, &answers);
    CHECK(pclose(client) == 0 && strstr("no answer\nHTTP 503\nHTTP 499\n", answers));
    const char* at_the_end[] = {"\"requests\":6", "\"answered\":4", "\"not_run\":1", NULL};
    check_summary(call.runtime, at_the_end);
    evalrt_release(call.runtime);
    check_nothing_left(before);

    /* In front of a server that runs; without a model of ours, bodies keep theirs. */
    evalrt_runtime* owner = open_server();
    config = (evalrt_config){.struct_size = sizeof config,
                             .backend = "openai-url",
                             .url = evalrt_url(owner),
                             .gateway = true};
    evalrt_runtime* runtime = open_with(config);
    CHECK(strcmp(evalrt_url(runtime), evalrt_url(owner)) != 0);
    asked();
    snprintf(command, sizeof command, CLIENT " %s '' one", evalrt_url(runtime));
    client = popen(command, "r");
    read_all(client, &answers);
    CHECK(pclose(client) == 0 && strcmp(answers, "answer to one \n") == 0);
    CHECK(strstr(asked(), "\"model\": \"of the client's own\""));
    evalrt_release(runtime);
    evalrt_release(owner);
}

static void nothing_but_ours(void) {
    char url[60];
    const int server = listener(&url);
    evalrt_config config = {.struct_size = sizeof config,
                            .backend = "openai-url",
                            .model = "m",
                            .url = url,
                            .wire = "anthropic",
                            .no_probe = true};
    Call call = {.runtime = open_with(config)};
    CHECK(!somebody_asks(server));
    CHECK_OK(ask(&call, "hi", (evalrt_request){.max_tokens = 5}));
    const char* request = answer_one(
        server, "{\"type\": \"message\", \"role\": \"assistant\", \"model\": \"m\", \"content\": "
                "[{\"type\": \"text\", \"text\": \"hello\"}], \"stop_reason\": \"end_turn\", "
                "\"usage\": {\"input_tokens\": 3, \"output_tokens\": 1}}");
    CHECK(strncmp(request, "POST /v1/messages ", 18) == 0);
    CHECK(strstr(request, "\r\nanthropic-version: 2023-06-01\r\n"));
    wait_for(&call);
    CHECK(call.code == EVALRT_OK && strcmp(call.text, "hello") == 0);
    CHECK(call.last.prompt_tokens == 3 && call.last.attempts == 1);
    CHECK(strstr(call.response, "\"finish_reason\": \"stop\"")); /* in the words of the request */
    evalrt_release(call.runtime);
    CHECK(!somebody_asks(server));
    close(server);
}

static void then_check_parity(Call* call) {
    CHECK_ERROR(evalrt_check_parity(call->runtime), EVALRT_INVALID, "outside of callbacks");
}

static void parity(void) {
    evalrt_config config = with_server("small");
    config.parity = 9;
    Call calls[6];
    memset(calls, 0, sizeof calls);
    evalrt_runtime* runtime = open_with(config);
    const char* not_yet[] = {"\"parity\":null", NULL};
    check_summary(runtime, not_yet);
    for (int i = 0; i < 6; ++i) {
        const char* questions[] = {"one", "two", "count", "fail", "three", "four"};
        calls[i].runtime = runtime;
        CHECK_OK(ask(&calls[i], questions[i],
                     (evalrt_request){.stream = i == 1, .name = i == 2 ? "changes" : NULL}));
    }
    for (int i = 0; i < 6; ++i) wait_for(&calls[i]);
    asked();
    CHECK_OK(evalrt_check_parity(runtime));
    const char* log = asked();
    CHECK(count_of(log, "\"in_flight\": 1}") == 5 && count_of(log, "\n") == 5);
    const char* checked[] = {"\"parity\":{\"checked\":5,\"identical\":4,\"equal_score\":null,"
                             "\"different\":1,\"ids\":[\"changes\"]}",
                             "\"requests\":6", "\"attempts\":6", NULL};
    check_summary(runtime, checked);

    calls[0] = (Call){.runtime = runtime, .then = then_check_parity};
    submit(&calls[0], "quick");
    wait_for(&calls[0]);
    calls[1] = (Call){.runtime = runtime};
    submit(&calls[1], "hold");
    CHECK_ERROR(evalrt_check_parity(runtime), EVALRT_INVALID, "requests still run");
    evalrt_close(runtime);
    CHECK_ERROR(evalrt_check_parity(runtime), EVALRT_CANCELLED, "the runtime is closed");
    check_summary(runtime, checked + 3);
    evalrt_release(runtime);

    /* No more than were asked for, and none if none were. */
    config.parity = 2;
    runtime = open_with(config);
    for (int i = 0; i < 6; ++i) {
        calls[i] = (Call){.runtime = runtime};
        submit(&calls[i], "quick");
    }
    for (int i = 0; i < 6; ++i) wait_for(&calls[i]);
    CHECK_OK(evalrt_check_parity(runtime));
    const char* two[] = {"\"checked\":2,\"identical\":2", NULL};
    check_summary(runtime, two);
    evalrt_release(runtime);
    runtime = open_server();
    CHECK_ERROR(evalrt_check_parity(runtime), EVALRT_INVALID, "parity is 0");
    evalrt_release(runtime);
}

static void* closes_when_asked_again(void* runtime) {
    while (!strstr(log_so_far(), "hold the second time")) usleep(1000);
    evalrt_close(runtime);
    return NULL;
}

static void close_while_checking(void) {
    evalrt_config config = with_server("small");
    config.parity = 1;
    Call call = {.runtime = open_with(config)};
    submit(&call, "hold the second time");
    wait_for(&call);
    CHECK(call.code == EVALRT_OK);
    asked();
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, closes_when_asked_again, call.runtime) == 0);
    CHECK_ERROR(evalrt_check_parity(call.runtime), EVALRT_CANCELLED, "closed");
    pthread_join(thread, NULL);
    check_summary(call.runtime, (const char*[]){"\"parity\":null", NULL});
    evalrt_release(call.runtime);
}

static void own_signals(void) {
    struct sigaction before[32], now;
    sigset_t mask_before, mask_now;
    memset(before, 0, sizeof before);
    for (int i = 1; i < 32; ++i) sigaction(i, NULL, &before[i]);
    pthread_sigmask(SIG_BLOCK, NULL, &mask_before);
    Call call = {.runtime = open_server()};
    submit(&call, "quick");
    wait_for(&call);
    for (int closed = 0; closed < 2; ++closed) {
        for (int i = 1; i < 32; ++i)
            CHECK(sigaction(i, NULL, &now) || now.sa_handler == before[i].sa_handler);
        pthread_sigmask(SIG_BLOCK, NULL, &mask_now);
        for (int i = 1; i < 32; ++i)
            CHECK(sigismember(&mask_now, i) == sigismember(&mask_before, i));
        evalrt_close(call.runtime);
    }
    evalrt_release(call.runtime);
}

static void two_runtimes(void) {
    Call first = {.runtime = open_server()}, second = {.runtime = open_server()};
    CHECK(strcmp(evalrt_url(first.runtime), evalrt_url(second.runtime)) != 0);
    submit(&first, "hold");
    submit(&second, "quick");
    wait_for(&second);
    evalrt_release(second.runtime);
    CHECK(second.code == EVALRT_OK && evalrt_running(first.runtime));
    Call third = {.runtime = first.runtime};
    submit(&third, "quick");
    wait_for(&third);
    CHECK(third.code == EVALRT_OK);

    /* Another way to the first one's server, which outlives it. */
    evalrt_config config = {
        .struct_size = sizeof config, .backend = "openai-url", .url = evalrt_url(first.runtime)};
    Call fourth = {.runtime = open_with(config)};
    CHECK(strcmp(evalrt_model(fourth.runtime), "small") == 0);
    submit(&fourth, "quick");
    wait_for(&fourth);
    CHECK(fourth.code == EVALRT_OK);
    evalrt_release(fourth.runtime);
    CHECK(evalrt_running(first.runtime));
    evalrt_release(first.runtime);
    CHECK(first.code == EVALRT_CANCELLED);
}

static void nothing_left(void) {
    evalrt_release(open_server()); /* what is made once */
    const Left before = left();
    for (int i = 0; i < 20; ++i) {
        Call call = {.runtime = open_server()};
        submit(&call, "quick");
        if (i % 2) wait_for(&call);
        evalrt_release(call.runtime);
        CHECK(call.done == 1);
    }
    check_nothing_left(before);
}

static const struct {
    const char* name;
    void (*run)(void);
} tests[] = {
    {"a chat is answered, and its figures are told", answer_with_figures},
    {"the pieces of a stream add up to its text", pieces_add_up},
    {"prompts, messages and bodies go out as they should", bodies},
    {"a failed request says why, and a server that has ended is started again", failures},
    {"200 requests, every third cancelled, closed at once: 200 times done", close_at_once},
    {"200 requests, every third cancelled, closed in the middle: 200 times done",
     close_in_the_middle},
    {"200 requests, every third cancelled, closed at the end: 200 times done", close_when_done},
    {"closing ends 200 requests that the server works on", close_running},
    {"several threads may submit, cancel and look", all_from_threads},
    {"closing while several threads submit: what was accepted is done", close_beside_threads},
    {"several threads may close, and each waits for the end", close_from_threads},
    {"a callback may close, and does not wait", close_in_callback},
    {"a callback may release, and all ends by itself", release_in_callback},
    {"a callback may submit and cancel", submit_in_callback},
    {"cancelling what has ended or never was is nothing", cancel_too_late},
    {"submitting after closing is an error", submit_after_close},
    {"what keeps a runtime from opening is said", open_errors},
    {"NULL and nonsense are errors", nonsense},
    {"a wrong struct_size is an error that says what to do", struct_sizes},
    {"the log gets each line once", log_lines},
    {"the summary tells the run so far, also after the end", summary},
    {"the summary tells that the server answers one request at a time", summary_of_one_at_a_time},
    {"the summary tells restarts, and the server's last words", summary_of_restarts},
    {"a journal answers what it holds, and a wrong one is refused", journal},
    {"a gateway lets other programs use the runtime", gateway},
    {"without a probe the server gets nothing but what is submitted", nothing_but_ours},
    {"a sample of the answers is asked again, one at a time", parity},
    {"closing ends a check of parity", close_while_checking},
    {"signals stay as they are", own_signals},
    {"two runtimes do not know each other", two_runtimes},
    {"20 runtimes later no thread, descriptor or process is left", nothing_left},
};

int main(int argc, char** argv) {
    const int log_file = mkstemp(log_path);
    CHECK(log_file >= 0);
    close(log_file);
    setenv("FAKE_OPENAI_LOG", log_path, 1);
    for (size_t i = 0; i < sizeof tests / sizeof *tests; ++i) {
        if (argc > 1 && !strstr(tests[i].name, argv[1])) continue;
        running_test = tests[i].name;
        tests[i].run();
        printf("ok: %s\n", tests[i].name);
        fflush(stdout);
    }
    unlink(log_path);
    return 0;
}
