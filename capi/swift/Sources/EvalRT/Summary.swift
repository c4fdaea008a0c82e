/// A run so far. What was not measured is `nil`, never 0.
public struct Summary: Decodable, Sendable {
    public struct CachedTokens: Decodable, Sendable {
        /// By the server's count.
        public let actual: Int?
        /// As planned.
        public let expected: Int?
        /// What any cache could have held at most.
        public let maximum: Int?
    }

    /// What asking a sample again, one at a time, gave.
    public struct Parity: Decodable, Sendable, Hashable {
        public let checked: Int
        public let identical: Int
        public let different: Int
        /// Of the different: the request's name, or else its number.
        public let ids: [String]
    }

    public struct Percentiles: Decodable, Sendable {
        public let p50: Double?
        public let p90: Double?
        public let p99: Double?
    }

    public let backend: String
    public let model: String
    public let requests: Int
    public let answered: Int
    public let failed: Int
    public let notRun: Int
    /// Of the answered: not asked for this time.
    public let fromJournal: Int
    /// By class: `rejected`, `timed_out`, ...
    public let failures: [String: Int]
    public let attempts: Int
    public let wallSeconds: Double
    public let requestsPerSecond: Double?
    public let outputTokensPerSecond: Double?
    public let maxInFlight: Int?
    public let inFlightMean: Double?
    public let promptTokens: Int?
    public let cachedTokens: CachedTokens
    public let completionTokens: Int?
    public let ttftMs: Percentiles
    public let interTokenMs: Percentiles
    /// How often the server that was started had to be started again.
    public let serverRestarts: Int
    /// "prefix cached: 1234 tokens (...)", or why there is no number.
    public let prefixCached: String
    /// `nil`: not checked.
    public let parity: Parity?
    public let notes: [String]
}
