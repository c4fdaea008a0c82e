import Foundation
internal import CEvalRT

/// A model server, started or found, and a queue in front of it that sends as many requests at once
/// as the server can batch, those with a common prefix together.
///
/// Any function may be called from any task or thread. Submit all you have at once: the order is
/// planned over the requests that wait.
///
/// ```swift
/// let runtime = try await Runtime.open(Configuration(backend: "mlx-server", model: "Qwen3-4B"))
/// let answer = try await runtime.complete(.chat([.user("The capital of France?")]))
/// print(answer.text)
/// await runtime.close()
/// ```
///
/// When the last reference goes, the runtime is closed; that waits until the server has ended.
public final class Runtime: Sendable {
    /// Safe from any thread, as evalrt.h promises.
    nonisolated(unsafe) let handle: OpaquePointer
    private let log: LogSink?

    /// An address for any OpenAI client, `http://host:port/v1`: the gateway's, if the
    /// configuration has one, or else the server's own, past the queue and uncounted.
    public let url: String
    /// For a body's `model`; may be empty.
    public let model: String

    /// Starts the server, or finds the running one, and returns when it has answered one token.
    ///
    /// A task that is cancelled meanwhile gets its error when the server has loaded.
    public static func open(_ configuration: Configuration) async throws(EvalError) -> Runtime {
        let result = await withCheckedContinuation {
            (done: CheckedContinuation<Result<Runtime, EvalError>, Never>) in
            DispatchQueue.global().async {
                do throws(EvalError) {
                    done.resume(returning: .success(try Runtime(blocking: configuration)))
                } catch {
                    done.resume(returning: .failure(error))
                }
            }
        }
        let runtime = try result.get()
        if Task.isCancelled {
            await runtime.close()
            throw EvalError(.cancelled, "the task was cancelled while the server started")
        }
        return runtime
    }

    /// As ``open(_:)``, for programs without tasks: the thread waits.
    @available(*, noasync, message: "use Runtime.open")
    public convenience init(_ configuration: Configuration) throws(EvalError) {
        try self.init(blocking: configuration)
    }

    private init(blocking configuration: Configuration) throws(EvalError) {
        let strings = CStrings()
        var config = evalrt_config()
        config.struct_size = MemoryLayout<evalrt_config>.stride
        config.backend = try strings.add(configuration.backend, "backend")
        config.model = try strings.add(configuration.model, "model")
        config.url = try strings.add(configuration.url, "URL")
        config.executable = try strings.add(configuration.executable, "executable")
        config.server_args = try strings.add(configuration.serverArguments, "server argument")
        config.api_key = try strings.add(configuration.apiKey, "API key")
        config.ca_file = try strings.add(configuration.caFile, "certificate file")
        config.order = try strings.add(configuration.order.rawValue, "order")
        config.journal = try strings.add(configuration.journal, "journal")
        config.wire = try strings.add(configuration.wire?.rawValue, "wire")
        config.gateway = configuration.gateway != nil
        config.gateway_port = try unsigned(configuration.gateway?.port, "gateway's port")
        config.gateway_token = try strings.add(configuration.gateway?.token, "gateway's token")
        config.no_probe = !configuration.probe
        config.parity = try unsigned(configuration.parity, "number of answers to ask again")
        config.port = try unsigned(configuration.port, "port")
        config.max_context = try unsigned(configuration.maxContext, "context")
        config.max_in_flight = try unsigned(configuration.maxInFlight, "number of requests at once")
        config.startup_timeout_ms = try milliseconds(configuration.startupTimeout,
                                                     "startup timeout")
        let log = configuration.log.map(LogSink.init)
        if let log {
            config.log_user = Unmanaged.passUnretained(log).toOpaque()
            config.on_log = { user, line in
                guard let user else { return }
                let sink = Unmanaged<LogSink>.fromOpaque(user).takeUnretainedValue()
                sink.write(String(cString: line))
            }
        }
        var out: OpaquePointer?
        let error = withExtendedLifetime((strings, log)) { evalrt_open(&config, &out) }
        if let error { throw EvalError(owned: error) }
        guard let handle = out else { throw EvalError(.internal, "no error and no runtime") }
        self.handle = handle
        self.log = log
        url = String(cString: evalrt_url(handle))
        model = String(cString: evalrt_model(handle))
    }

    deinit { evalrt_release(handle) }

    /// False once it is closed, and while the server that it started has ended and is started
    /// again.
    public var isRunning: Bool { evalrt_running(handle) }

    /// Asks, and waits for the whole answer. Cancelling the task takes the request back, from the
    /// server too. `onText` gets the text as it arrives, if the server streams; on the runtime's own
    /// thread, which it must not keep waiting.
    ///
    /// - Throws: ``EvalError``; a cancelled task gets the code `cancelled`.
    public func complete(_ request: Request, onText: (@Sendable (String) -> Void)? = nil)
        async throws(EvalError) -> Completion {
        let answer = Locked<CheckedContinuation<Result<Completion, EvalError>, Never>?>(nil)
        let call = Call(self, onText: onText) { result in
            answer.with { $0 }?.resume(returning: result)
        }
        let result = await withTaskCancellationHandler {
            await withCheckedContinuation { continuation in
                answer.with { $0 = continuation }
                call.start(request)
            }
        } onCancel: {
            call.cancel()
        }
        return try result.get()
    }

    /// Asks all, and waits for all answers, which come in the order of the requests. One that fails
    /// costs no other.
    public func complete(_ requests: [Request]) async -> [Result<Completion, EvalError>] {
        await withTaskGroup(of: (Int, Result<Completion, EvalError>).self) { group in
            for (index, request) in requests.enumerated() {
                group.addTask {
                    do throws(EvalError) {
                        return (index, .success(try await self.complete(request)))
                    } catch {
                        return (index, .failure(error))
                    }
                }
            }
            var results = [Result<Completion, EvalError>](
                repeating: .failure(EvalError(.internal, "not asked")), count: requests.count)
            for await (index, result) in group { results[index] = result }
            return results
        }
    }

    /// Asks, for programs without tasks. `done` is called once, on the runtime's own thread, which it
    /// must not keep waiting.
    public func complete(_ request: Request,
                         done: @escaping @Sendable (Result<Completion, EvalError>) -> Void) {
        Call(self, onText: nil, done: done).start(request)
    }

    /// The text piece by piece; in one piece from a server that does not stream. Throws
    /// ``EvalError``. Leaving the loop takes the request back; so does cancelling the task, which
    /// ends the loop without an error.
    public func stream(_ request: Request) -> AsyncThrowingStream<String, any Error> {
        AsyncThrowingStream { continuation in
            let pieces = Locked(0), left = Locked(false)
            let call = Call(self) { piece in
                pieces.with { $0 += 1 }
                continuation.yield(piece)
            } done: { result in
                switch result {
                case .success(let answer):
                    if pieces.with({ $0 }) == 0 { continuation.yield(answer.text) }
                    continuation.finish()
                // The end of a cancelled request may come before the stream's own.
                case .failure where left.with({ $0 }): continuation.finish()
                case .failure(let error): continuation.finish(throwing: error)
                }
            }
            continuation.onTermination = { reason in
                guard case .cancelled = reason else { return }
                left.with { $0 = true }
                call.cancel()
            }
            call.start(request)
        }
    }

    /// Asks ``Configuration/parity`` of the answers so far again, one at a time, past the journal:
    /// ``Summary/parity`` then tells how many are the same. Ask nothing else meanwhile; while
    /// requests run it fails with the code `invalid`.
    public func checkParity() async throws(EvalError) {
        let error = await withCheckedContinuation {
            (done: CheckedContinuation<EvalError?, Never>) in
            DispatchQueue.global().async {
                done.resume(returning: evalrt_check_parity(self.handle).map(EvalError.init(owned:)))
            }
        }
        if let error { throw error }
    }

    /// The run so far; also after it is closed.
    public func summary() throws(EvalError) -> Summary {
        let decoder = JSONDecoder()
        decoder.keyDecodingStrategy = .convertFromSnakeCase
        do {
            return try decoder.decode(Summary.self, from: Data(summaryJSON().text.utf8))
        } catch let error as EvalError {
            throw error
        } catch {
            throw EvalError(.internal, "the summary is of another version: \(error)")
        }
    }

    /// All that ``summary()`` has and more, as `evalrt run --json` writes it.
    public func summaryJSON() throws(EvalError) -> JSON {
        var text: UnsafeMutablePointer<CChar>?
        if let error = evalrt_summary(handle, &text) { throw EvalError(owned: error) }
        defer { evalrt_string_free(text) }
        return JSON(text.map { String(cString: $0) } ?? "null")
    }

    /// Ends every request with the code `cancelled`, then stops the server. Any number of times.
    public func close() async {
        await withCheckedContinuation { done in
            DispatchQueue.global().async {
                evalrt_close(self.handle)
                done.resume()
            }
        }
    }

    /// As the other, for programs without tasks: the thread waits, unless it is in one of the
    /// runtime's own callbacks.
    @available(*, noasync, message: "use await close()")
    public func close() { evalrt_close(handle) }
}

private final class LogSink: Sendable {
    let write: @Sendable (String) -> Void
    init(_ write: @escaping @Sendable (String) -> Void) { self.write = write }
}
