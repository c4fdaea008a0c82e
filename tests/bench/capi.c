/* What evalrt_submit costs the thread that calls it, and whether memory stays flat:
 *   bench_capi URL COUNT ROUNDS BYTES    each round submits COUNT prompts of BYTES, and waits.
 * No prompt comes twice. */
#define _DEFAULT_SOURCE
#define _DARWIN_C_SOURCE
#include <evalrt.h>

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static long done, failed;

static void on_event(void* user, const evalrt_event* event) {
    (void)user;
    if (event->kind != EVALRT_DONE) return;
    pthread_mutex_lock(&mutex);
    ++done;
    failed += event->error != NULL;
    pthread_cond_signal(&changed);
    pthread_mutex_unlock(&mutex);
}

static double seconds(clockid_t clock) {
    struct timespec time;
    clock_gettime(clock, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

/* The most so far, in MB. */
static double memory(void) {
    struct rusage used;
    getrusage(RUSAGE_SELF, &used);
#ifdef __APPLE__
    return (double)used.ru_maxrss / 1e6;
#else
    return (double)used.ru_maxrss / 1e3;
#endif
}

static void check(evalrt_error* error) {
    if (!error) return;
    fprintf(stderr, "%s\n", evalrt_error_message(error));
    exit(1);
}

int main(int argc, char** argv) {
    if (argc != 5) return fputs("usage: bench_capi URL COUNT ROUNDS BYTES\n", stderr), 2;
    const long count = atol(argv[2]), rounds = atol(argv[3]);
    const size_t bytes = (size_t)atol(argv[4]);
    evalrt_config config = {.struct_size = sizeof config,
                            .backend = "openai-url",
                            .model = "m",
                            .url = argv[1],
                            .max_in_flight = 64};
    evalrt_runtime* runtime;
    check(evalrt_open(&config, &runtime));

    char* messages = malloc(bytes + 100);
    evalrt_request request = {
        .struct_size = sizeof request, .messages_json = messages, .max_tokens = 64};
    double best = 1e9, after_first = 0;
    for (long round = 0; round < rounds; ++round) {
        double cpu = 0;
        for (long i = 0; i < count; ++i) {
            const int size =
                sprintf(messages, "[{\"role\": \"user\", \"content\": \"%ld ", round * count + i);
            memset(messages + size, 'x', bytes);
            memcpy(messages + size + bytes, "\"}]", 4);
            const double before = seconds(CLOCK_THREAD_CPUTIME_ID);
            evalrt_error* error = evalrt_submit(runtime, &request, on_event, NULL, NULL);
            cpu += seconds(CLOCK_THREAD_CPUTIME_ID) - before;
            check(error);
        }
        pthread_mutex_lock(&mutex);
        while (done < (round + 1) * count) pthread_cond_wait(&changed, &mutex);
        pthread_mutex_unlock(&mutex);
        const double us = cpu / (double)count * 1e6;
        if (us < best) best = us;
        if (round == 0) after_first = memory();
    }
    evalrt_release(runtime);
    double clock_cost = seconds(CLOCK_THREAD_CPUTIME_ID);
    for (int i = 0; i < 10000; ++i) seconds(CLOCK_THREAD_CPUTIME_ID);
    clock_cost = (seconds(CLOCK_THREAD_CPUTIME_ID) - clock_cost) / 1e4 * 1e6;
    printf("{\"submit_us\": %.3f, \"clock_us\": %.3f, \"count\": %ld, \"rounds\": %ld, "
           "\"failed\": %ld, \"memory_mb\": %.1f, \"grown_mb\": %.1f}\n",
           best, clock_cost, count, rounds, failed, memory(), memory() - after_first);
    free(messages);
    return failed == 0 ? 0 : 1;
}
