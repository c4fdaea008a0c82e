import Foundation

/// An answer, complete: one that stopped before its end is an ``EvalError``.
public struct Completion: Sendable {
    /// Token counts as the server told them; `nil`: it did not.
    public struct Usage: Sendable, Hashable {
        public let promptTokens: Int?
        /// How many of them it had in its prefix cache.
        public let cachedTokens: Int?
        public let completionTokens: Int?
    }

    public struct Timing: Sendable, Hashable {
        /// From submission to sending.
        public let queued: Duration
        /// From sending to the first piece of text; `nil`: it came in one piece.
        public let firstText: Duration?
        /// From submission to the end.
        public let total: Duration
    }

    public let text: String
    /// The whole answer as one body; a stream is put together.
    public let json: JSON
    public let httpStatus: Int
    public let usage: Usage
    public let timing: Timing
    /// How often it was sent, as far as that counts.
    public let attempts: Int

    /// What the model wants to have called.
    public var toolCalls: [ToolCall] { first?.message?.tool_calls ?? [] }

    /// Why the text ends: `stop`, `length`, `tool_calls`, ...
    public var finishReason: String? { first?.finish_reason }

    private struct Choice: Decodable {
        struct Message: Decodable { let tool_calls: [ToolCall]? }
        let message: Message?
        let finish_reason: String?
    }
    private struct Body: Decodable { let choices: [Choice] }
    private var first: Choice? { (try? json.decode(Body.self))?.choices.first }
}
