import EvalRT
import Foundation

/// What `startServe` returns in place of a `Process`: the two members that its callers use, and
/// what a backend other than tinygpt makes them need.
public final class Serve: Sendable {
    public let runtime: Runtime
    private let address: String

    fileprivate init(_ runtime: Runtime, address: String) {
        self.runtime = runtime
        self.address = address
    }

    public var isRunning: Bool { runtime.isRunning }

    /// For clients of another process: OPENAI_BASE_URL of a Python child. What they ask tinygpt
    /// goes straight to it, as ever; another backend's is queued and counted with the rest.
    public var baseURL: String { runtime.url }

    /// For a body's `model`.
    public var model: String { runtime.model }

    /// Stops the server, and says how much of the prompts came from its cache.
    public func terminate() {
        if let summary = try? runtime.summary(), summary.requests > 0 {
            EvalHarnessSupport.say(summary.prefixCached)
        }
        EvalHarnessSupport.serves.forget(address)
        runtime.close()
    }
}

/// Which server is behind an address that a call site has put together from the port.
final class Serves: @unchecked Sendable {
    private let lock = NSLock()
    private var all: [String: Serve] = [:]

    subscript(address: String) -> Serve? {
        lock.lock()
        defer { lock.unlock() }
        return all[address]
    }

    func remember(_ serve: Serve, at address: String) {
        lock.lock()
        all[address] = serve
        lock.unlock()
    }

    func forget(_ address: String) {
        lock.lock()
        all[address] = nil
        lock.unlock()
    }
}

public enum EvalHarnessSupport {
    public struct Common: Sendable {
        public var modelPath: String?
        public var tokenizer: String?
        public var outJsonl: String?
        public var modelName: String?
        public var modelStep: Int?
        public var baseline = false
        public var limit = 0
        public var servePort = 8097

        public init(modelPath: String? = nil, tokenizer: String? = nil, outJsonl: String? = nil,
                    modelName: String? = nil, modelStep: Int? = nil, baseline: Bool = false,
                    limit: Int = 0, servePort: Int = 8097) {
            self.modelPath = modelPath
            self.tokenizer = tokenizer
            self.outJsonl = outJsonl
            self.modelName = modelName
            self.modelStep = modelStep
            self.baseline = baseline
            self.limit = limit
            self.servePort = servePort
        }
    }

    static let serves = Serves()

    static func say(_ line: String) { FileHandle.standardError.write(Data("\(line)\n".utf8)) }

    /// What all harness commands have in common, and the rest. The backend's flags are taken out:
    /// ``BackendChoice/ofThisProcess`` has them.
    public static func parseCommon(_ args: [String], usage: () -> Never) -> (Common, [String]) {
        var arguments = args
        guard BackendChoice(taking: &arguments) != nil else { usage() }
        var common = Common()
        var rest: [String] = []
        var waiting = arguments[...]
        while let first = waiting.popFirst() {
            func value() -> String {
                guard let next = waiting.popFirst() else { usage() }
                return next
            }
            func number() -> Int {
                guard let number = Int(value()) else { usage() }
                return number
            }
            switch first {
            case "--tokenizer": common.tokenizer = value()
            case "--out": common.outJsonl = value()
            case "--model-name": common.modelName = value()
            case "--model-step": common.modelStep = number()
            case "--baseline": common.baseline = true
            case "--limit": common.limit = number()
            case "--serve-port": common.servePort = number()
            case "-h", "--help": usage()
            case _ where first.hasPrefix("-"):
                rest.append(first)
                if let next = waiting.first, !next.hasPrefix("-") { rest.append(value()) }
            default:
                if common.modelPath == nil { common.modelPath = first } else { rest.append(first) }
            }
        }
        return (common, rest)
    }

    /// Starts the chosen backend and returns when it has answered; ends the program if it does not.
    /// The call sites that have it as `startServe(modelPath:port:)` stay as they are.
    public static func startServe(modelPath: String, port: Int, maxContext: Int = 4096,
                                  extraArgs: [String] = [],
                                  backend: BackendChoice = .ofThisProcess) -> Serve {
        do {
            return try start(modelPath: modelPath, port: port, maxContext: maxContext,
                             extraArgs: extraArgs, backend: backend)
        } catch {
            say("could not start \(backend.backend): \(error.message)")
            exit(1)
        }
    }

    static func start(modelPath: String, port: Int, maxContext: Int = 4096,
                      extraArgs: [String] = [], backend: BackendChoice)
        throws(EvalError) -> Serve {
        var configuration = Configuration(backend: backend.backend, model: modelPath)
        configuration.url = backend.url
        configuration.executable = backend.executable
        if backend.backend == "tinygpt", backend.executable == nil, backend.url == nil {
            configuration.executable = ownExecutable()
        }
        configuration.serverArguments = extraArgs
        // Who asks the port that the call site chose, whatever model he names, finds the runtime.
        if backend.backend == "tinygpt", backend.url == nil {
            configuration.port = port
        } else {
            configuration.gateway = .init(port: port)
        }
        configuration.maxContext = maxContext
        configuration.maxInFlight = backend.maxInFlight
        configuration.journal = backend.journal
        configuration.log = { say($0) }
        let address = "http://127.0.0.1:\(port)/v1"
        let serve = Serve(try Runtime(configuration), address: address)
        serves.remember(serve, at: address)
        return serve
    }

    /// This program, if it is tinygpt; else what is on PATH.
    private static func ownExecutable() -> String? {
        let name = CommandLine.arguments.first ?? ""
        if URL(fileURLWithPath: name).lastPathComponent.hasPrefix("tinygpt"),
            let path = resolveExecutable(name) {
            return path.path
        }
        return (resolveExecutable("tinygpt") ?? resolveExecutable("tinygpt-cli"))?.path
    }

    public static func resolveExecutable(_ name: String) -> URL? {
        let path = ProcessInfo.processInfo.environment["PATH"] ?? ""
        let folders = name.contains("/") ? [""] : path.split(separator: ":").map { "\($0)/" }
        return folders.map { $0 + name }
            .first { FileManager.default.isExecutableFile(atPath: $0) }
            .map { URL(fileURLWithPath: $0) }
    }

    /// One completion, from a server that `startServe` has started. Nil: there is no answer, and
    /// stderr says why. Many at once: `serve.runtime.complete(_:)`.
    public static func completion(baseURL: String, prompt: String, maxTokens: Int = 128,
                                  temperature: Double = 0) -> String? {
        guard let serve = serves[baseURL] else {
            say("no server was started for \(baseURL)")
            return nil
        }
        let request = completionRequest(serve, prompt: prompt, maxTokens: maxTokens,
                                        temperature: temperature)
        let done = DispatchSemaphore(value: 0)
        let answer = Answer()
        serve.runtime.complete(request) { result in
            switch result {
            case .success(let completion): answer.text = completion.text
            case .failure(let error): say("no answer: \(error)")
            }
            done.signal()
        }
        done.wait()
        return answer.text
    }

    /// Written before the semaphore is signalled, read after.
    private final class Answer: @unchecked Sendable { var text: String? }

    /// The body that the harness has always sent.
    public static func completionRequest(_ serve: Serve, prompt: String, maxTokens: Int = 128,
                                         temperature: Double = 0) -> Request {
        let body: [String: Any] = ["model": serve.model, "prompt": prompt, "max_tokens": maxTokens,
                                   "temperature": temperature]
        // A string, two numbers and a string are always JSON.
        let data = try? JSONSerialization.data(withJSONObject: body, options: .sortedKeys)
        var request = Request.body(JSON(String(decoding: data ?? Data(), as: UTF8.self)),
                                   endpoint: "/v1/completions")
        request.timeout = .seconds(180)
        return request
    }

    public static func displayName(_ common: Common) -> String {
        common.modelName
            ?? URL(fileURLWithPath: common.modelPath ?? "model").deletingPathExtension()
            .lastPathComponent
    }

    public static func appendRow(common: Common, task: String, subtask: String?, metric: String,
                                 score: Double, n: Int, wall: Double, harness: String?) {
        guard let out = common.outJsonl, let model = common.modelPath else { return }
        let row = Row(run_id: UUID().uuidString, model_path: model,
                      model_name: displayName(common), model_step: common.modelStep,
                      baseline: common.baseline, task: task, subtask: subtask, metric: metric,
                      score: score, n_examples: n, wall_seconds: wall,
                      timestamp: ISO8601DateFormatter().string(from: Date()),
                      harness_version: harness)
        do {
            try row.append(to: URL(fileURLWithPath: out))
        } catch {
            say("could not append to \(out): \(error)")
        }
    }
}

/// A score as the harness keeps it, a JSON object a line.
public struct Row: Codable, Sendable, Hashable {
    public let run_id: String
    public let model_path: String
    public let model_name: String
    public let model_step: Int?
    public let baseline: Bool
    public let task: String
    public let subtask: String?
    public let metric: String
    public let score: Double
    public let n_examples: Int
    public let wall_seconds: Double
    public let timestamp: String
    public let harness_version: String?

    func append(to file: URL) throws {
        let encoder = JSONEncoder()
        encoder.outputFormatting = [.sortedKeys, .withoutEscapingSlashes]
        let line = try encoder.encode(self) + Data("\n".utf8)
        if !FileManager.default.fileExists(atPath: file.path) {
            try Data().write(to: file)
        }
        let handle = try FileHandle(forWritingTo: file)
        defer { try? handle.close() }
        try handle.seekToEnd()
        try handle.write(contentsOf: line)
    }
}
