import Foundation
internal import CEvalRT

final class Locked<State>: @unchecked Sendable {
    private let lock = NSLock()
    private var state: State

    init(_ state: State) { self.state = state }

    func with<Result>(_ use: (inout State) -> Result) -> Result {
        lock.lock()
        defer { lock.unlock() }
        return use(&state)
    }
}

/// C strings that live as long as this.
final class CStrings {
    private var all: [UnsafeMutablePointer<CChar>] = []
    private var lists: [UnsafeMutablePointer<UnsafePointer<CChar>?>] = []

    deinit {
        all.forEach { free($0) }
        lists.forEach { $0.deallocate() }
    }

    /// C would take a NUL for the end.
    func add(_ text: String?, _ name: String) throws(EvalError) -> UnsafePointer<CChar>? {
        guard let text else { return nil }
        guard !text.utf8.contains(0) else {
            throw EvalError(.invalid, "the \(name) has a NUL in it")
        }
        guard let copy = strdup(text) else { throw EvalError(.internal, "out of memory") }
        all.append(copy)
        return UnsafePointer(copy)
    }

    func add(_ texts: [String], _ name: String)
        throws(EvalError) -> UnsafePointer<UnsafePointer<CChar>?>? {
        guard !texts.isEmpty else { return nil }
        let list = UnsafeMutablePointer<UnsafePointer<CChar>?>.allocate(capacity: texts.count + 1)
        list.initialize(repeating: nil, count: texts.count + 1)
        lists.append(list)
        for (index, text) in texts.enumerated() { list[index] = try add(text, name) }
        return UnsafePointer(list)
    }
}

/// For a field in which 0 means the default.
func unsigned(_ value: Int?, _ name: String) throws(EvalError) -> UInt32 {
    guard let value else { return 0 }
    guard let number = UInt32(exactly: value) else {
        throw EvalError(.invalid, "the \(name) is \(value)")
    }
    return number
}

/// 0 would mean the default: what is shorter than a millisecond is one.
func milliseconds(_ value: Duration?, _ name: String) throws(EvalError) -> UInt32 {
    guard let value else { return 0 }
    let whole = value / .milliseconds(1)
    guard value >= .zero, let number = UInt32(exactly: max(1, whole.rounded(.up))) else {
        throw EvalError(.invalid, "the \(name) is \(value)")
    }
    return number
}

/// One request on its way. It keeps its runtime: the last reference to that may go in its last
/// callback, where evalrt_release does not wait.
final class Call: Sendable {
    private struct State {
        var id: evalrt_id = 0
        var cancelled = false
    }

    private let runtime: Runtime
    private let onText: (@Sendable (String) -> Void)?
    private let done: @Sendable (Result<Completion, EvalError>) -> Void
    private let state = Locked(State())

    init(_ runtime: Runtime, onText: (@Sendable (String) -> Void)?,
         done: @escaping @Sendable (Result<Completion, EvalError>) -> Void) {
        self.runtime = runtime
        self.onText = onText
        self.done = done
    }

    func start(_ request: Request) {
        do throws(EvalError) {
            try submit(request)
        } catch {
            done(.failure(error))
        }
    }

    /// Before the start, too.
    func cancel() {
        let id = state.with {
            $0.cancelled = true
            return $0.id
        }
        if id != 0 { evalrt_cancel(runtime.handle, id) }
    }

    private func submit(_ request: Request) throws(EvalError) {
        guard !state.with({ $0.cancelled }) else { throw EvalError(.cancelled, "cancelled") }
        let strings = CStrings()
        var given = evalrt_request()
        given.struct_size = MemoryLayout<evalrt_request>.stride
        switch request.content {
        case .prompt(let text): given.prompt = try strings.add(text, "prompt")
        case .messages(let json): given.messages_json = try strings.add(json, "list of messages")
        case .body(let json, let endpoint):
            given.body_json = try strings.add(json, "body")
            given.endpoint = try strings.add(endpoint, "endpoint")
        }
        given.extra_json = try strings.add(request.extra, "extra member")
        given.temperature = request.temperature
        given.max_tokens = try unsigned(request.maxTokens, "number of tokens")
        given.timeout_ms = try milliseconds(request.timeout, "timeout")
        given.session = try strings.add(request.session, "session")
        given.name = try strings.add(request.name, "name")
        given.turn = try unsigned(request.turn, "turn")
        given.stream = onText != nil

        let retained = Unmanaged.passRetained(self)
        var id: evalrt_id = 0
        let error = withExtendedLifetime(strings) {
            evalrt_submit(runtime.handle, &given, onEvent, retained.toOpaque(), &id)
        }
        if let error {
            retained.release()
            throw EvalError(owned: error)
        }
        let cancelled = state.with {
            $0.id = id
            return $0.cancelled
        }
        if cancelled { evalrt_cancel(runtime.handle, id) }
    }

    fileprivate func text(_ event: evalrt_event) { onText?(string(event.text, event.text_size)) }

    fileprivate func end(_ event: evalrt_event) {
        let status = Int(event.http_status)
        let json = event.response_json.map { JSON(string($0, event.response_json_size)) }
        if let error = event.error {
            done(.failure(EvalError(lent: error, httpStatus: status > 0 ? status : nil,
                                    response: json)))
            return
        }
        let known = { (count: Int64) in count >= 0 ? Int(count) : nil }
        done(.success(Completion(
            text: string(event.text, event.text_size),
            json: json ?? JSON("null"),
            httpStatus: status,
            usage: .init(promptTokens: known(event.prompt_tokens),
                         cachedTokens: known(event.cached_tokens),
                         completionTokens: known(event.completion_tokens)),
            timing: .init(queued: .milliseconds(event.queued_ms),
                          firstText: event.first_text_ms < 0
                              ? nil : .milliseconds(event.first_text_ms),
                          total: .milliseconds(event.total_ms)),
            attempts: Int(event.attempts))))
    }
}

private func string(_ text: UnsafePointer<CChar>, _ size: Int) -> String {
    String(decoding: UnsafeRawBufferPointer(start: text, count: size), as: UTF8.self)
}

private func onEvent(_ user: UnsafeMutableRawPointer?, _ event: UnsafePointer<evalrt_event>) {
    guard let user else { return }
    let call = Unmanaged<Call>.fromOpaque(user)
    if event.pointee.kind == EVALRT_TEXT {
        call.takeUnretainedValue().text(event.pointee)
    } else {
        call.takeRetainedValue().end(event.pointee)
    }
}
