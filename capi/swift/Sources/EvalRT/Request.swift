import Foundation

/// One message of a chat. What it has no place for (content in parts, images) goes as JSON:
/// ``Request/chat(messages:tools:extra:)``.
public struct Message: Codable, Hashable, Sendable {
    public var role: String
    public var content: String?
    public var toolCalls: [ToolCall]?
    /// Which call a message of the role `tool` answers.
    public var toolCallID: String?
    public var name: String?

    public init(role: String, content: String?, toolCalls: [ToolCall]? = nil,
                toolCallID: String? = nil, name: String? = nil) {
        self.role = role
        self.content = content
        self.toolCalls = toolCalls
        self.toolCallID = toolCallID
        self.name = name
    }

    public static func system(_ text: String) -> Message { Message(role: "system", content: text) }
    public static func user(_ text: String) -> Message { Message(role: "user", content: text) }
    public static func assistant(_ text: String) -> Message {
        Message(role: "assistant", content: text)
    }

    enum CodingKeys: String, CodingKey {
        case role, content, name
        case toolCalls = "tool_calls"
        case toolCallID = "tool_call_id"
    }
}

/// A function that the model wants to have called.
public struct ToolCall: Codable, Hashable, Sendable {
    public struct Function: Codable, Hashable, Sendable {
        public var name: String
        /// A JSON object as text, as the model wrote it; it may be wrong.
        public var arguments: String

        public init(name: String, arguments: String) {
            self.name = name
            self.arguments = arguments
        }
    }

    public var id: String
    public var type: String
    public var function: Function

    public init(id: String, function: Function) {
        self.id = id
        type = "function"
        self.function = function
    }
}

/// A function that the model may call.
public struct Tool: Codable, Hashable, Sendable {
    public struct Function: Codable, Hashable, Sendable {
        public var name: String
        public var description: String?
        /// A JSON schema.
        public var parameters: JSON
    }

    public var type: String
    public var function: Function

    public init(name: String, description: String? = nil, parameters: JSON) {
        type = "function"
        function = Function(name: name, description: description, parameters: parameters)
    }

    /// The parameters byte for byte.
    var json: String {
        var text = "{\"type\": \(JSON.quoted(type)), "
            + "\"function\": {\"name\": \(JSON.quoted(function.name))"
        if let description = function.description {
            text += ", \"description\": \(JSON.quoted(description))"
        }
        return text + ", \"parameters\": \(function.parameters.text)}}"
    }
}

/// A question to a model server.
public struct Request: Sendable {
    enum Content: Sendable {
        case prompt(String)
        case messages(String)
        case body(String, endpoint: String?)
    }

    let content: Content
    let extra: String?

    /// 0, the likeliest token, if nothing else is said. A whole body has its own.
    public var temperature = 0.0
    /// `nil`: the server's default. A whole body has its own.
    public var maxTokens: Int?
    /// From submission to the end of the answer; `nil`: none.
    public var timeout: Duration?
    /// The turns of one conversation share a session.
    public var session: String?
    /// Within its session, from 0.
    public var turn = 0
    /// What you call it; for the journal, never sent.
    public var name: String?

    private init(_ content: Content, extra: String? = nil) {
        self.content = content
        self.extra = extra
    }

    /// A chat. `extra` has more members of the body (`stop`, `tool_choice`), which win.
    public static func chat(_ messages: [Message], tools: [Tool] = [],
                            extra: [String: JSON] = [:]) -> Request {
        let list = messages.map { (try? JSON(encoding: $0).text) ?? "null" }
        return chat(messages: JSON("[\(list.joined(separator: ", "))]"), tools: tools, extra: extra)
    }

    /// A chat whose messages are a JSON array.
    public static func chat(messages: JSON, tools: [Tool] = [],
                            extra: [String: JSON] = [:]) -> Request {
        var members = extra
        if !tools.isEmpty {
            members["tools"] = JSON("[\(tools.map(\.json).joined(separator: ", "))]")
        }
        return Request(.messages(messages.text), extra: object(members))
    }

    /// A completion of a text.
    public static func prompt(_ text: String, extra: [String: JSON] = [:]) -> Request {
        Request(.prompt(text), extra: object(extra))
    }

    /// A whole body, a JSON object that goes out as it is; to `/v1/chat/completions` if no endpoint
    /// is named.
    public static func body(_ json: JSON, endpoint: String? = nil) -> Request {
        Request(.body(json.text, endpoint: endpoint))
    }

    private static func object(_ members: [String: JSON]) -> String? {
        guard !members.isEmpty else { return nil }
        let list = members.sorted { $0.key < $1.key }
            .map { "\(JSON.quoted($0.key)): \($0.value.text)" }
        return "{\(list.joined(separator: ", "))}"
    }
}
