import Foundation

/// JSON as text, kept byte for byte: the order of members survives, which a model's chat template
/// may show to the model. Checked where it is used.
///
/// As `Codable` it is the value itself, not its text; a `JSONDecoder` does not tell the order of
/// members, so what comes through one has them sorted.
public struct JSON: Sendable, Hashable, CustomStringConvertible {
    public let text: String

    public init(_ text: String) { self.text = text }

    /// Members are sorted, so that equal values are equal texts.
    public init(encoding value: some Encodable) throws {
        let encoder = JSONEncoder()
        encoder.outputFormatting = [.sortedKeys, .withoutEscapingSlashes]
        text = String(decoding: try encoder.encode(value), as: UTF8.self)
    }

    public func decode<Value: Decodable>(_ type: Value.Type = Value.self) throws -> Value {
        try JSONDecoder().decode(type, from: Data(text.utf8))
    }

    public var description: String { text }

    static func quoted(_ text: String) -> String {
        // Encoding a string does not fail.
        (try? JSON(encoding: text).text) ?? "\"\""
    }
}

extension JSON: Codable {
    private enum Value: Codable {
        case null, bool(Bool), integer(Int64), number(Double), string(String)
        case array([Value]), object([String: Value])

        init(from decoder: any Decoder) throws {
            let container = try decoder.singleValueContainer()
            if container.decodeNil() {
                self = .null
            } else if let value = try? container.decode(Bool.self) {
                self = .bool(value)
            } else if let value = try? container.decode(Int64.self) {
                self = .integer(value)
            } else if let value = try? container.decode(Double.self) {
                self = .number(value)
            } else if let value = try? container.decode(String.self) {
                self = .string(value)
            } else if let value = try? container.decode([Value].self) {
                self = .array(value)
            } else {
                self = .object(try container.decode([String: Value].self))
            }
        }

        func encode(to encoder: any Encoder) throws {
            var container = encoder.singleValueContainer()
            switch self {
            case .null: try container.encodeNil()
            case .bool(let value): try container.encode(value)
            case .integer(let value): try container.encode(value)
            case .number(let value): try container.encode(value)
            case .string(let value): try container.encode(value)
            case .array(let value): try container.encode(value)
            case .object(let value): try container.encode(value)
            }
        }
    }

    public init(from decoder: any Decoder) throws {
        try self.init(encoding: Value(from: decoder))
    }

    public func encode(to encoder: any Encoder) throws {
        try decode(Value.self).encode(to: encoder)
    }
}
