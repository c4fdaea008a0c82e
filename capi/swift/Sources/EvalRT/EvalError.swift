internal import CEvalRT

/// Why there is no runtime or no answer. A failure never comes as an empty answer.
///
/// Swift 6.3.1 crashes on `catch where` with it inside a loop: write a `guard` in the `catch`.
public struct EvalError: Error, Sendable, CustomStringConvertible {
    /// One case for each thing that a caller would do.
    public enum Code: String, Sendable, CaseIterable {
        /// Bad argument: fix the call.
        case invalid
        /// Nothing answers there: start or fix the server.
        case unreachable
        /// The server that was started ends again and again: read why.
        case exited
        /// The server said no: fix the request.
        case rejected
        /// HTTP 429, again and again: ask for less.
        case rateLimited
        /// HTTP 503 or 529, again and again: come back later.
        case overloaded
        /// HTTP 401 or 403: fix the key.
        case auth
        /// The prompt does not fit: shorten it.
        case contextTooLong
        /// Not the protocol: is that a model server?
        case malformed
        /// The answer stopped before its end: never score it.
        case truncated
        /// Too slow: retry, or raise the limit.
        case timedOut
        /// The task was cancelled, or the runtime closed.
        case cancelled
        /// The server died each time this ran: leave it out.
        case poison
        /// The journal is refused or cannot be written: read why. Nothing is lost.
        case journal
        /// A defect of the library, or no memory left.
        case `internal`
    }

    public let code: Code
    /// What is wrong and what to do, or the server's own words.
    public let message: String
    /// `nil`: none arrived.
    public let httpStatus: Int?
    /// The server's answer, if it sent one.
    public let response: JSON?

    public var description: String { "\(code.rawValue): \(message)" }

    init(_ code: Code, _ message: String) {
        self.code = code
        self.message = message
        httpStatus = nil
        response = nil
    }

    /// Lent, as in an event.
    init(lent error: OpaquePointer, httpStatus: Int? = nil, response: JSON? = nil) {
        code = Code(evalrt_error_code(error))
        message = String(cString: evalrt_error_message(error))
        self.httpStatus = httpStatus
        self.response = response
    }

    /// Frees what a call has returned.
    init(owned error: OpaquePointer) {
        self.init(lent: error)
        evalrt_error_free(error)
    }
}

extension EvalError.Code {
    init(_ code: evalrt_code) {
        switch code {
        case EVALRT_INVALID: self = .invalid
        case EVALRT_UNREACHABLE: self = .unreachable
        case EVALRT_EXITED: self = .exited
        case EVALRT_REJECTED: self = .rejected
        case EVALRT_RATE_LIMITED: self = .rateLimited
        case EVALRT_OVERLOADED: self = .overloaded
        case EVALRT_AUTH: self = .auth
        case EVALRT_CONTEXT_TOO_LONG: self = .contextTooLong
        case EVALRT_MALFORMED: self = .malformed
        case EVALRT_TRUNCATED: self = .truncated
        case EVALRT_TIMED_OUT: self = .timedOut
        case EVALRT_CANCELLED: self = .cancelled
        case EVALRT_POISON: self = .poison
        case EVALRT_JOURNAL: self = .journal
        default: self = .internal
        }
    }
}
