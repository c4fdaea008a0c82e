/* evalrt.h - run evaluation requests against a model server, from C or Swift.
 *
 * The whole contract is five rules.
 *
 *  1. Ownership. You own a runtime until evalrt_release, an error until
 *     evalrt_error_free and a string until evalrt_string_free. Everything else
 *     is lent: what you pass in is copied before the call returns, what a
 *     callback receives is gone when it returns.
 *  2. Errors. A call that can fail returns an error, and NULL means it worked.
 *     Out-parameters are written in both cases.
 *  3. Structs. Set struct_size to the size you compiled with. Zero in any other
 *     field means the default. Fields are only ever added at the end.
 *  4. Threads. Call anything from any thread. Callbacks run one at a time on
 *     the runtime's own thread and must not keep it waiting. After a fork, only
 *     the parent may use a runtime that was open before.
 *  5. Events. An accepted request gets any number of EVALRT_TEXT events and
 *     then exactly one EVALRT_DONE, also when it is cancelled or the runtime is
 *     closed. After EVALRT_DONE the runtime no longer knows `user`.
 */
#ifndef EVALRT_H
#define EVALRT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __clang__
#pragma clang diagnostic push
#pragma clang diagnostic ignored "-Wnullability-extension"
#pragma clang assume_nonnull begin
#define EVALRT_NULLABLE _Nullable
#define EVALRT_NONNULL _Nonnull
#else
#define EVALRT_NULLABLE
#define EVALRT_NONNULL
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* The library's SONAME carries it; who loads the library by hand compares it
 * with evalrt_abi(). It goes up only when something here changes its meaning. */
enum { EVALRT_ABI = 1 };

typedef struct evalrt_error evalrt_error;
typedef struct evalrt_runtime evalrt_runtime;
typedef uint64_t evalrt_id; /* of a request, within its runtime; never 0 */

/* One value for each thing you would do. */
typedef enum evalrt_code {
    EVALRT_OK = 0,               /* what evalrt_error_code says of NULL */
    EVALRT_INVALID = 1,          /* bad argument: fix the call */
    EVALRT_UNREACHABLE = 2,      /* nothing answers there: start or fix the server */
    EVALRT_EXITED = 3,           /* the server we started ends again and again: read why */
    EVALRT_REJECTED = 4,         /* it said no: http_status 4xx: fix the request, 5xx: the server */
    EVALRT_RATE_LIMITED = 5,     /* HTTP 429, again and again: ask for less */
    EVALRT_OVERLOADED = 6,       /* HTTP 503 or 529, again and again: come back later */
    EVALRT_AUTH = 7,             /* HTTP 401 or 403: fix the key */
    EVALRT_CONTEXT_TOO_LONG = 8, /* the prompt does not fit: shorten it */
    EVALRT_MALFORMED = 9,        /* not the protocol: is that a model server? */
    EVALRT_TRUNCATED = 10,       /* the answer stopped before its end: never score it */
    EVALRT_TIMED_OUT = 11,       /* too slow: retry or raise the limit */
    EVALRT_CANCELLED = 12,       /* you cancelled it or closed the runtime */
    EVALRT_POISON = 13,          /* the server died each time this ran: leave it out */
    EVALRT_INTERNAL = 14,        /* our bug, or out of memory */
    EVALRT_JOURNAL = 15          /* it is refused or cannot be written: read why; nothing is lost */
} evalrt_code;

typedef struct evalrt_config {
    size_t struct_size;
    const char* EVALRT_NULLABLE backend;    /* default: "tinygpt"; a wrong name lists all */
    const char* EVALRT_NULLABLE model;      /* path or name, as that backend names models */
    const char* EVALRT_NULLABLE url;        /* use this running server, start none; ends in /v1 */
    const char* EVALRT_NULLABLE executable; /* program to start; default: the backend's, on PATH */
    const char* EVALRT_NULLABLE const* EVALRT_NULLABLE server_args; /* NULL ends them */
    const char* EVALRT_NULLABLE api_key;                            /* never logged */
    const char* EVALRT_NULLABLE ca_file; /* PEM; default: the system's certificates */
    const char* EVALRT_NULLABLE order; /* default: "planned", shared prefixes together; or "fifo" */
    uint32_t port;                     /* of the server to start; default: any free one */
    uint32_t max_context;              /* tokens; only where the server can be told */
    uint32_t max_in_flight;            /* requests sent at once; default: the backend's */
    uint32_t startup_timeout_ms;       /* to the server's first token; default: five minutes */
    void (*EVALRT_NULLABLE on_log)(void* EVALRT_NULLABLE log_user, const char* line);
    void* EVALRT_NULLABLE log_user; /* known until evalrt_release returns */
    /* File that keeps every answer before its EVALRT_DONE; what it has is not asked again. One that
     * is damaged, in use or of another configuration is refused with EVALRT_JOURNAL. */
    const char* EVALRT_NULLABLE journal; /* default: none */
    const char* EVALRT_NULLABLE wire;    /* that the server speaks: "openai" or "anthropic";
                                            default: the backend's */
    uint32_t parity;       /* answers, taken at random, that evalrt_check_parity asks again */
    uint32_t gateway_port; /* default: any free one */
    /* Serve programs of this machine that speak to OpenAI or Anthropic, at evalrt_url: what they
     * ask is queued, ordered and counted with what is submitted here. A model that is set above
     * then wins over those that bodies name. */
    bool gateway;
    /* With a url: send the server nothing but what is submitted. evalrt_open then finds out neither
     * who answers there nor whether somebody does. */
    bool no_probe;
    const char* EVALRT_NULLABLE gateway_token; /* its clients must send it; default: none */
} evalrt_config;

typedef struct evalrt_request {
    size_t struct_size;
    /* Set exactly one of the three. */
    const char* EVALRT_NULLABLE prompt;        /* a completion of this text, */
    const char* EVALRT_NULLABLE messages_json; /* or a chat: a JSON array, */
    const char* EVALRT_NULLABLE body_json;     /* or a whole body: a JSON object */
    const char* EVALRT_NULLABLE endpoint;      /* of a body; default: "/v1/chat/completions";
                                                  or "/v1/completions", "/v1/messages" */
    /* For a prompt or messages; a body has its own. */
    const char* EVALRT_NULLABLE extra_json; /* object: more members (tools, stop), which win */
    double temperature;                     /* default: 0, the likeliest token */
    uint32_t max_tokens;                    /* default: the server's */
    /* For all. */
    uint32_t timeout_ms;                 /* from submit to EVALRT_DONE; default: none */
    uint32_t turn;                       /* within its session */
    bool stream;                         /* send EVALRT_TEXT events, if the server streams */
    const char* EVALRT_NULLABLE session; /* the turns of one conversation share it */
    const char* EVALRT_NULLABLE name;    /* what you call it; for the journal, never sent */
} evalrt_request;

typedef enum evalrt_kind { EVALRT_TEXT = 1, EVALRT_DONE = 2 } evalrt_kind;

/* Strings are UTF-8 and end with a 0 that their size does not count. */
typedef struct evalrt_event {
    size_t struct_size; /* what the library knows */
    evalrt_id id;
    evalrt_kind kind;
    int32_t http_status; /* 0: none arrived */
    const char* text;    /* TEXT: the new piece; DONE: all of it */
    size_t text_size;
    /* The rest is set with EVALRT_DONE only. */
    const evalrt_error* EVALRT_NULLABLE error; /* NULL: the request worked */
    const char* EVALRT_NULLABLE response_json; /* the answer or the error, as one body */
    size_t response_json_size;
    int64_t prompt_tokens, cached_tokens, completion_tokens; /* -1: the server did not say */
    double queued_ms;                                        /* from submit to sending */
    double first_text_ms; /* from sending; -1: it came in one piece */
    double total_ms;      /* from submit */
    uint64_t attempts;    /* how often it was sent, as far as that counts */
} evalrt_event;

typedef void (*evalrt_event_fn)(void* EVALRT_NULLABLE user, const evalrt_event* event);

uint32_t evalrt_abi(void);
evalrt_code evalrt_error_code(const evalrt_error* EVALRT_NULLABLE error);
/* What is wrong and what to do; lent until the error is freed. */
const char* evalrt_error_message(const evalrt_error* EVALRT_NULLABLE error);
void evalrt_error_free(evalrt_error* EVALRT_NULLABLE error);
void evalrt_string_free(char* EVALRT_NULLABLE string);

/* Starts the server, or finds the running one, and returns when it has answered one token. */
evalrt_error* EVALRT_NULLABLE evalrt_open(const evalrt_config* config,
                                          evalrt_runtime* EVALRT_NULLABLE* EVALRT_NONNULL out);
/* Ends every request with EVALRT_CANCELLED, then stops the server, and returns when that is done
 * and the last callback has returned. From a callback of the runtime it returns at once, and all
 * this follows. Any number of times, from any number of threads. */
void evalrt_close(evalrt_runtime* EVALRT_NULLABLE runtime);
/* Closes and frees. Once, as the last use: nothing else may run on the runtime or come later.
 * From a callback, events still follow: one EVALRT_DONE for each request, as always. */
void evalrt_release(evalrt_runtime* EVALRT_NULLABLE runtime);

/* For any OpenAI client, ends in /v1: the gateway, or else the server itself, past our queue. Lent
 * until evalrt_release, as is the model. */
const char* evalrt_url(const evalrt_runtime* runtime);
const char* evalrt_model(const evalrt_runtime* runtime); /* for a body's "model"; may be empty */
/* False once it is closed, and while the server that it started has ended and is started again. */
bool evalrt_running(const evalrt_runtime* runtime);

/* Never blocks. *id is written before any event, and is 0 if there is an error. Submit all you
 * have: the order in which requests are sent is planned over those that wait. */
evalrt_error* EVALRT_NULLABLE evalrt_submit(evalrt_runtime* runtime, const evalrt_request* request,
                                            evalrt_event_fn on_event, void* EVALRT_NULLABLE user,
                                            evalrt_id* EVALRT_NULLABLE id);
/* Never blocks. Ends the request with EVALRT_CANCELLED, unless it ends by itself before that. */
void evalrt_cancel(evalrt_runtime* runtime, evalrt_id id);

/* Asks evalrt_config.parity of the answers so far again, one at a time and past the journal, and
 * returns when all have come: evalrt_summary then tells how many are the same. Not from a callback,
 * and not while requests run (EVALRT_INVALID); submit nothing meanwhile. */
evalrt_error* EVALRT_NULLABLE evalrt_check_parity(evalrt_runtime* runtime);

/* The run so far as one JSON object: counts, throughput, latencies, cached tokens, parity, by the
 * names of `evalrt run --json`; what was not measured is null. Also after evalrt_close. */
evalrt_error* EVALRT_NULLABLE evalrt_summary(const evalrt_runtime* runtime,
                                             char* EVALRT_NULLABLE* EVALRT_NONNULL out);

#ifdef __cplusplus
}
#endif

#undef EVALRT_NULLABLE
#undef EVALRT_NONNULL
#ifdef __clang__
#pragma clang assume_nonnull end
#pragma clang diagnostic pop
#endif

#endif
