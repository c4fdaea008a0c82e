import EvalRT
import Foundation

/// Some rows of a single-turn category of the Berkeley Function-Calling Leaderboard, in prompting
/// mode, with a prompt and a checker of our own: a figure to compare two runs by, not one for the
/// leaderboard (`evalrt bfcl` makes those).
public struct MiniBFCL: Sendable {
    public struct Case: Sendable {
        let id: String
        let messages: [Message]
        /// By function and parameter the values that are right; an empty string: may be left out.
        let truth: [[String: [String: [JSON]]]]
    }

    public struct Problem: Error, CustomStringConvertible {
        public let description: String
    }

    public let category: String
    public let cases: [Case]

    /// - Parameter data: bfcl_eval's folder of data.
    public init(category: String, data: URL, limit: Int) throws {
        struct Question: Decodable { let id: String; let question: [[Message]] }
        struct Answer: Decodable { let id: String; let ground_truth: [[String: [String: [JSON]]]] }

        let name = "BFCL_v4_\(category).json"
        func lines(_ path: String) throws -> [Substring] {
            guard let text = try? String(contentsOf: data.appendingPathComponent(path),
                                         encoding: .utf8) else {
                throw Problem(
                    description: "cannot read \(data.path)/\(path): give bfcl_eval's folder")
            }
            return text.split(separator: "\n")
        }
        let answers = try lines("possible_answer/\(name)")
            .map { try JSON(String($0)).decode(Answer.self) }
        let truth = Dictionary(answers.map { ($0.id, $0.ground_truth) }) { first, _ in first }
        var cases: [Case] = []
        for line in try lines(name).prefix(limit > 0 ? limit : .max) {
            let row = try JSON(String(line)).decode(Question.self)
            // As text: the order of a schema's members is a part of the question. It is the last.
            guard let functions = line.range(of: "\"function\":"), line.hasSuffix("}"),
                let turn = row.question.first, let right = truth[row.id] else {
                throw Problem(description: "\(row.id) is not a single-turn question with an answer")
            }
            let rules = """
                You call functions. Answer with the calls alone, as a Python list: \
                [name(parameter=value)]. The functions are:
                \(line[functions.upperBound...].dropLast())
                """
            cases.append(Case(id: row.id, messages: [.system(rules)] + turn, truth: right))
        }
        self.category = category
        self.cases = cases
    }

    public func requests(maxTokens: Int) -> [Request] {
        cases.map { item in
            var request = Request.chat(item.messages)
            request.maxTokens = maxTokens
            request.name = item.id
            return request
        }
    }

    /// Whether the text is the one call that is asked for.
    static func isRight(_ text: String, _ truth: [[String: [String: [JSON]]]]) -> Bool {
        guard truth.count == 1, let (name, parameters) = truth[0].first,
            let call = Call(text), call.name == name else { return false }
        guard Set(call.arguments.keys).isSubset(of: parameters.keys) else { return false }
        return parameters.allSatisfy { key, allowed in
            guard let given = call.arguments[key] else {
                return allowed.contains { $0.text == "\"\"" }
            }
            return allowed.contains { same($0, given) }
        }
    }

    private static func same(_ right: JSON, _ given: String) -> Bool {
        if let text: String = try? right.decode() {
            let bare = given.trimmingCharacters(in: CharacterSet(charactersIn: "'\""))
            return bare.count == given.count - 2 && bare.lowercased() == text.lowercased()
        }
        if let truth: Bool = try? right.decode() { return given == (truth ? "True" : "False") }
        if let number: Double = try? right.decode() { return Double(given) == number }
        let plain = { (text: String) in
            text.filter { !$0.isWhitespace }.replacing("'", with: "\"")
        }
        return plain(right.text) == plain(given)
    }

    /// `[name(a=1, b="x, y")]`, with or without the brackets.
    struct Call {
        let name: String
        var arguments: [String: String] = [:]

        init?(_ given: String) {
            var text = given.trimmingCharacters(in: .whitespacesAndNewlines)
            if text.hasPrefix("["), text.hasSuffix("]") {
                text = String(text.dropFirst().dropLast())
            }
            guard let open = text.firstIndex(of: "("), text.hasSuffix(")") else { return nil }
            name = text[..<open].trimmingCharacters(in: .whitespaces)
            var parts = [""], depth = 0
            var quote: Character?
            for character in text[text.index(after: open)...].dropLast() {
                if let mark = quote {
                    if character == mark { quote = nil }
                } else if "'\"".contains(character) {
                    quote = character
                } else if "([{".contains(character) {
                    depth += 1
                } else if ")]}".contains(character) {
                    depth -= 1
                    if depth < 0 { return nil } // more than one call
                } else if character == ",", depth == 0 {
                    parts.append("")
                    continue
                }
                parts[parts.count - 1].append(character)
            }
            guard depth == 0, quote == nil else { return nil }
            for part in parts where !part.allSatisfy(\.isWhitespace) {
                guard let sign = part.firstIndex(of: "=") else { return nil }
                let key = part[..<sign].trimmingCharacters(in: .whitespaces)
                arguments[key] = part[part.index(after: sign)...]
                    .trimmingCharacters(in: .whitespaces)
            }
        }
    }
}

/// One way through a suite.
public struct Pass: Sendable {
    public let results: [Result<Completion, EvalError>]
    public let wall: Double
    public let summary: Summary

    public var answered: Int { results.count(where: { (try? $0.get()) != nil }) }

    /// Of the answered: a failure is not a wrong answer.
    public func right(_ suite: MiniBFCL) -> Int {
        zip(results, suite.cases).count { result, item in
            (try? result.get()).map { MiniBFCL.isRight($0.text, item.truth) } ?? false
        }
    }

    public static func oneAtATime(_ requests: [Request], _ serve: Serve) async throws -> Pass {
        let start = ContinuousClock.now
        var results: [Result<Completion, EvalError>] = []
        for request in requests { results += await serve.runtime.complete([request]) }
        return try Pass(results, since: start, serve)
    }

    public static func atOnce(_ requests: [Request], _ serve: Serve) async throws -> Pass {
        let start = ContinuousClock.now
        return try Pass(await serve.runtime.complete(requests), since: start, serve)
    }

    private init(_ results: [Result<Completion, EvalError>], since start: ContinuousClock.Instant,
                 _ serve: Serve) throws {
        self.results = results
        wall = (ContinuousClock.now - start) / .seconds(1)
        summary = try serve.runtime.summary()
    }
}
