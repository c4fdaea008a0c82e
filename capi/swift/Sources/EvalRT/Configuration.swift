/// Which model server a ``Runtime`` uses, and how. A field that is left alone has its default.
public struct Configuration: Sendable {
    /// In which order requests that wait are sent.
    public enum Order: String, Sendable {
        /// Requests that share a prefix together, so that the server computes it once.
        case planned
        /// As they were submitted.
        case fifo
    }

    /// The server's kind: `tinygpt`, `omlx`, `mlx-server` or `openai-url`. Opening with another
    /// name fails with a message that lists all.
    public var backend = "tinygpt"
    /// Path or name, as the backend names models.
    public var model: String?
    /// Use this running server (`http://host:port/v1`), start none.
    public var url: String?
    /// The program to start; `nil`: the backend's, on PATH.
    public var executable: String?
    /// More arguments for it.
    public var serverArguments: [String] = []
    /// Sent as a bearer token, never logged.
    public var apiKey: String?
    /// A PEM file; `nil`: the system's certificates.
    public var caFile: String?
    public var order = Order.planned
    /// Of the server to start; `nil`: any free one.
    public var port: Int?
    /// In tokens; only where the server can be told.
    public var maxContext: Int?
    /// Requests sent at once; `nil`: as many as the backend takes.
    public var maxInFlight: Int?
    /// How long the server may load its model; `nil`: five minutes.
    public var startupTimeout: Duration?
    /// A file that keeps every answer, made if it is not there: what it holds is not asked again.
    /// One of a run with another model, server or settings is refused.
    public var journal: String?
    /// Gets what the user should read, a line at a time, on the runtime's own thread, which it must
    /// not keep waiting.
    public var log: (@Sendable (String) -> Void)?

    public init(backend: String = "tinygpt", model: String? = nil, url: String? = nil) {
        self.backend = backend
        self.model = model
        self.url = url
    }
}
