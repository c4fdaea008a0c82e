/// Which model server a ``Runtime`` uses, and how. A field that is left alone has its default.
public struct Configuration: Sendable {
    /// In which order requests that wait are sent.
    public enum Order: String, Sendable {
        /// Requests that share a prefix together, so that the server computes it once.
        case planned
        /// As they were submitted.
        case fifo
    }

    /// What a server speaks.
    public enum Wire: String, Sendable {
        case openai, anthropic
    }

    /// An address of this machine for other programs.
    public struct Gateway: Sendable {
        /// `nil`: any free one.
        public var port: Int?
        /// Its clients must send it, as their API key; `nil`: none.
        public var token: String?

        public init(port: Int? = nil, token: String? = nil) {
            self.port = port
            self.token = token
        }
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
    /// `nil`: what the backend speaks. Requests are translated where that is another wire.
    public var wire: Wire?
    /// Makes ``Runtime/url`` an address for programs that speak to OpenAI or Anthropic: what they
    /// ask is queued, ordered and counted with what is asked here. The model above, if there is
    /// one, wins over the one that they name.
    public var gateway: Gateway?
    /// False, with a `url`: send the server nothing but what is asked. Opening then finds out
    /// neither who answers there nor whether somebody does.
    public var probe = true
    /// How many of the answers, taken at random, ``Runtime/checkParity()`` asks again.
    public var parity = 0
    /// Gets what the user should read, a line at a time, on the runtime's own thread, which it must
    /// not keep waiting.
    public var log: (@Sendable (String) -> Void)?

    public init(backend: String = "tinygpt", model: String? = nil, url: String? = nil) {
        self.backend = backend
        self.model = model
        self.url = url
    }
}
