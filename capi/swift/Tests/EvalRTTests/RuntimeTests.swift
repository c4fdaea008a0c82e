import Foundation
import Testing

@testable import EvalRT

@Suite(.timeLimit(.minutes(60))) struct RuntimeTests {
    let server: FakeServer
    init() throws { server = try FakeServer() }

    @Test("a chat is answered, and its figures are told") func answer() async throws {
        let runtime = try await server.open()
        #expect(runtime.url.hasPrefix("http://127.0.0.1:") && runtime.url.hasSuffix("/v1"))
        #expect(runtime.model == "default_model")
        #expect(runtime.isRunning)
        let answer = try await runtime.complete(chat("hello"))
        #expect(answer.text == "answer to hello ")
        #expect(answer.httpStatus == 200)
        #expect(answer.usage == .init(promptTokens: 40, cachedTokens: 20, completionTokens: 3))
        #expect(answer.timing.total > .zero)
        #expect(answer.attempts == 1)
        #expect(answer.finishReason == "stop")
        #expect(answer.toolCalls.isEmpty)
        #expect(answer.json.text.contains("\"answer to hello \""))
        await runtime.close()
        #expect(!runtime.isRunning)
    }

    @Test("the pieces of a stream add up to its text") func stream() async throws {
        let runtime = try await server.open()
        var pieces: [String] = []
        for try await piece in runtime.stream(chat("one two three")) { pieces.append(piece) }
        #expect(pieces.count > 1)
        #expect(pieces.joined() == "answer to one two three ")

        let heard = Locked<[String]>([])
        let answer = try await runtime.complete(chat("one two three")) { piece in
            heard.with { $0.append(piece) }
        }
        #expect(heard.with { $0.joined() } == answer.text)
        #expect(answer.usage.completionTokens == 5)
    }

    @Test("a completion does not stream here: its text comes in one piece") func onePiece()
        async throws {
        let runtime = try await server.open()
        var pieces: [String] = []
        for try await piece in runtime.stream(.prompt("say")) { pieces.append(piece) }
        #expect(pieces == ["answer to say"])
    }

    @Test("prompts, messages, tools and bodies go out as they should") func bodies() async throws {
        let runtime = try await server.open()
        var request = Request.prompt("say \"hä\"\n", extra: ["stop": JSON("[\"x\"]")])
        request.temperature = 0.25
        request.maxTokens = 5
        _ = try await runtime.complete(request)
        #expect(server.lines.last!.contains(
            #""path": "/v1/completions", "body": {"prompt": "say \"h\u00e4\"\n", "#
                + #""temperature": 0.25, "max_tokens": 5, "stop": ["x"]"#))

        let tool = Tool(name: "weather", description: "Tells it",
                        parameters: JSON(#"{"zone": 1, "area": {"b": 2, "a": [1.50]}}"#))
        let call = ToolCall(id: "c1", function: .init(name: "weather", arguments: "{}"))
        _ = try await runtime.complete(.chat(
            [.system("short"), Message(role: "assistant", content: nil, toolCalls: [call]),
             Message(role: "tool", content: "rain", toolCallID: "c1"), .user("and\u{0}now")],
            tools: [tool], extra: ["tool_choice": JSON(#""auto""#)]))
        let line = server.lines.last!
        #expect(line.contains(#""path": "/v1/chat/completions""#))
        #expect(line.contains(#"{"content": "rain", "role": "tool", "tool_call_id": "c1"}"#))
        #expect(line.contains(#""content": "and\u0000now""#))
        #expect(line.contains(#""tools": [{"type": "function", "function": {"name": "weather", "#
            + #""description": "Tells it", "#
            + #""parameters": {"zone": 1, "area": {"b": 2, "a": [1.5]}}}}]"#))
        #expect(line.contains(#""tool_choice": "auto""#))

        _ = try await runtime.complete(.body(
            JSON(#"{"new_field": [1], "messages": [{"content": "raw"}]}"#)))
        #expect(server.lines.last!.contains(
            #"{"new_field": [1], "messages": [{"content": "raw"}]"#))
    }

    @Test("failures are typed, with the server's words") func failures() async throws {
        let runtime = try await server.open()
        let refused = await failure { _ = try await runtime.complete(chat("fail")) }
        #expect(refused?.code == .rejected && refused?.httpStatus == 400)
        #expect(refused?.message.contains("this one is refused") == true)
        #expect(refused?.response?.text.contains("this one is refused") == true)

        var late = chat("hold")
        late.timeout = .milliseconds(50)
        let timedOut = await failure { _ = try await runtime.complete(late) }
        #expect(timedOut?.code == .timedOut && timedOut?.response == nil)

        await #expect(throws: EvalError.self) {
            for try await _ in runtime.stream(chat("fail")) {}
        }
    }

    @Test("a server that dies is started again, and asked the same") func restart() async throws {
        let runtime = try await server.open()
        let answer = try await runtime.complete(chat("die once"))
        #expect(answer.text == "answer to die once ")
        #expect(runtime.isRunning)
        #expect(try runtime.summary().serverRestarts == 1)
    }

    @Test("a connection that breaks costs nothing") func hangUp() async throws {
        let runtime = try await server.open()
        let answer = try await runtime.complete(chat("hang up once"))
        #expect(answer.text == "answer to hang up once ")
        #expect(answer.attempts == 1)
        #expect(server.lines.count(where: { $0.contains("hang up once") }) == 2)
    }

    @Test("cancelling a task reaches the server") func cancel() async throws {
        let runtime = try await server.open()
        let task = Task { try await runtime.complete(chat("hold")) }
        #expect(await server.waits(for: "\"hold\""))
        task.cancel()
        let result = await task.result
        #expect(throws: EvalError.self) { try result.get() }
        if case .failure(let error as EvalError) = result { #expect(error.code == .cancelled) }
        #expect(await server.waits(for: "\"gone\": \"hold\""))
    }

    @Test("what is cancelled before it starts is not sent") func cancelEarly() async throws {
        let runtime = try await server.open()
        let task = Task {
            while !Task.isCancelled { await Task.yield() }
            return await failure { _ = try await runtime.complete(chat("never")) }
        }
        task.cancel()
        #expect(await task.value?.code == .cancelled)
        _ = try await runtime.complete(chat("after"))
        #expect(!server.lines.contains { $0.contains("never") })
    }

    @Test("leaving a stream reaches the server") func leave() async throws {
        let runtime = try await server.open()
        var pieces = 0
        for try await piece in runtime.stream(chat("talk")) {
            #expect(piece == "word ")
            pieces += 1
            if pieces == 3 { break }
        }
        #expect(await server.waits(for: "\"gone\": \"talk\""))
    }

    @Test("cancelling a task that reads a stream ends its loop") func cancelStream() async throws {
        let runtime = try await server.open()
        for _ in 0..<50 { // the request's end races with the stream's
            let begun = Locked(false)
            let task = Task {
                for try await _ in runtime.stream(chat("talk")) { begun.with { $0 = true } }
            }
            while !begun.with({ $0 }) { try await Task.sleep(for: .milliseconds(5)) }
            task.cancel()
            try await task.value
        }
        #expect(await server.waits(for: "\"gone\": \"talk\""))
    }

    @Test("many at once: answers come in the order of the requests, each once") func many()
        async throws {
        let runtime = try await server.open { $0.maxInFlight = 8 }
        // Some are answered when there is another beside them.
        func question(_ index: Int) -> String {
            index % 20 == 7 ? "fail" : index % 20 == 3 ? "meet 2 \(index)" : "number \(index)"
        }
        let results = await runtime.complete((0..<200).map { chat(question($0)) })
        #expect(results.count == 200)
        for (index, result) in results.enumerated() {
            switch result {
            case .success(let answer): #expect(answer.text == "answer to \(question(index)) ")
            case .failure(let error): #expect(index % 20 == 7 && error.code == .rejected)
            }
        }
        let summary = try runtime.summary()
        #expect(summary.backend == "mlx-server" && summary.model == "default_model")
        #expect(summary.answered == 190 && summary.failed == 10 && summary.notRun == 0)
        #expect(summary.failures == ["rejected": 10])
        #expect(summary.maxInFlight == 8)
        #expect(summary.promptTokens == 190 * 40 && summary.cachedTokens.actual == 190 * 20)
        #expect(summary.prefixCached.hasPrefix("prefix cached: \(190 * 20) tokens"))
        let widths = server.lines.compactMap { line -> Int? in
            line.split(separator: "\"in_flight\": ").last.flatMap { Int($0.dropLast()) }
        }
        #expect(widths.max()! > 1 && widths.max()! <= 8)
    }

    @Test("closing ends what waits, and what comes later is an error") func close() async throws {
        let runtime = try await server.open()
        let waiting = Task { await failure { _ = try await runtime.complete(chat("hold")) } }
        #expect(await server.waits(for: "\"hold\""))
        let other = Task { await runtime.close() }
        await runtime.close()
        await other.value
        #expect(await waiting.value?.code == .cancelled)
        let later = await failure { _ = try await runtime.complete(chat("later")) }
        #expect(later?.code == .cancelled)
        #expect(try runtime.summary().notRun == 1)
    }

    @Test("the last reference may go in the last callback") func lastReference() async throws {
        var runtime: Runtime? = try await server.open()
        let url = runtime!.url
        weak let gone = runtime
        let text = try await withCheckedThrowingContinuation { continuation in
            runtime!.complete(chat("sleep 0.3")) { continuation.resume(with: $0.map(\.text)) }
            runtime = nil
        }
        #expect(text == "answer to sleep 0.3 ")
        for _ in 0..<30000 where gone != nil { try await Task.sleep(for: .milliseconds(10)) }
        #expect(gone == nil)
        // Its server ends with it.
        var code: EvalError.Code?
        for _ in 0..<3000 where code != .unreachable {
            try await Task.sleep(for: .milliseconds(10))
            let elsewhere = Configuration(backend: "openai-url", url: url)
            code = await failure { _ = try await Runtime.open(elsewhere) }?.code
        }
        #expect(code == .unreachable)
    }

    @Test("what keeps a runtime from opening is said") func openErrors() async throws {
        func code(_ configuration: Configuration, _ words: String) async -> EvalError.Code? {
            let error = await failure { _ = try await Runtime.open(configuration) }
            #expect(error?.message.contains(words) == true, "\(String(describing: error))")
            return error?.code
        }
        #expect(await code(.init(backend: "nosuch", model: "m"), "mlx-server") == .invalid)
        #expect(await code(.init(), "no model") == .invalid)
        #expect(await code(server.configuration(model: "dies-while-loading"),
                           "no such model in this folder") == .exited)
        #expect(await code(server.configuration(model: "wrong-key"), "Incorrect API key") == .auth)
        #expect(await code(.init(backend: "openai-url", url: "http://127.0.0.1:1/v1"),
                           "127.0.0.1:1") == .unreachable)
        var odd = server.configuration()
        odd.port = -1
        #expect(await code(odd, "the port is -1") == .invalid)
        odd.port = 65536
        #expect(await code(odd, "65536") == .invalid)
        odd = server.configuration()
        odd.serverArguments = ["--one", "--no-such-option"]
        #expect(await code(odd, "--no-such-option") == .exited)
        odd = server.configuration(model: "a\u{0}b")
        #expect(await code(odd, "the model has a NUL in it") == .invalid)
    }

    @Test("nonsense is an error, and costs nothing") func nonsense() async throws {
        let runtime = try await server.open()
        func message(_ request: Request) async -> String {
            let error = await failure { _ = try await runtime.complete(request) }
            #expect(error?.code == .invalid)
            return error?.message ?? ""
        }
        #expect(await message(.chat(messages: JSON("[{]"))).contains("not JSON"))
        #expect(await message(.prompt("p", extra: ["stop": JSON("[")])).contains("not JSON"))
        #expect(await message(.body(JSON("7"))).contains("not a JSON object"))
        #expect(await message(.body(JSON("{}"), endpoint: "/v2")).contains("/v2"))
        #expect(await message(.prompt("a\u{0}b")).contains("NUL"))
        var request = chat("hi")
        request.maxTokens = -5
        #expect(await message(request).contains("-5"))
        request = chat("hi")
        request.timeout = .seconds(-1)
        #expect(await message(request).contains("timeout"))
        request = chat("hi")
        request.temperature = .nan
        #expect(await message(request).contains("temperature"))
        #expect(try runtime.summary().requests == 0)
    }

    @Test("the log gets what the user should read") func log() async throws {
        let lines = Locked<[String]>([])
        let runtime = try await server.open { $0.log = { line in lines.with { $0.append(line) } } }
        _ = try await runtime.complete(.chat([.user("hi")], extra: ["seed": JSON("7")]))
        await runtime.close()
        #expect(lines.with { $0 }.contains { $0.contains("dropped \"seed\"") })
    }

    @Test("a journal answers what it holds") func journal() async throws {
        let file = server.folder.appendingPathComponent("journal").path
        for time in 1...2 {
            let runtime = try await server.open { $0.journal = file }
            var request = chat("remember")
            request.name = "memory"
            #expect(try await runtime.complete(request).text == "answer to remember ")
            #expect(try runtime.summary().fromJournal == time - 1)
            await runtime.close()
        }
        #expect(server.lines.count(where: { $0.contains("remember") }) == 1)
        var other = server.configuration(model: "other")
        other.journal = file
        let refused = await failure { _ = try await Runtime.open(other) }
        #expect(refused?.code == .journal)
    }

    @Test("a gateway lets other programs use the runtime") func gateway() async throws {
        let runtime = try await server.open {
            $0.gateway = .init(token: "secret")
            $0.maxInFlight = 2
        }
        var other = Configuration(backend: "openai-url", model: "their own", url: runtime.url)
        #expect(await failure { _ = try await Runtime.open(other) }?.code == .auth)
        other.apiKey = "secret"
        other.probe = false
        for wire in [Configuration.Wire.openai, .anthropic] {
            other.wire = wire
            let client = try await Runtime.open(other)
            #expect(try await client.complete(chat("hi")).text == "answer to hi ")
            await client.close()
        }
        #expect(try await runtime.complete(chat("hi")).text == "answer to hi ")
        let summary = try runtime.summary()
        #expect(summary.requests == 3 && summary.answered == 3)
        // And the one that it had to answer to be there.
        #expect(server.lines.count(where: { $0.contains("\"default_model\"") }) == 4)
        #expect(!server.lines.contains { $0.contains("their own") })
        var taken = server.configuration()
        taken.gateway = .init(port: Int(runtime.url.split(separator: ":").last!.dropLast(3)))
        #expect(await failure { _ = try await Runtime.open(taken) }?.code == .invalid)
    }

    @Test("a server that is not probed gets nothing but what is asked") func noProbe()
        async throws {
        let nobody = Configuration(backend: "openai-url", url: "http://127.0.0.1:1/v1")
        #expect(await failure { _ = try await Runtime.open(nobody) }?.code == .unreachable)
        let owner = try await server.open()
        let before = server.lines.count
        var configuration = Configuration(backend: "openai-url", url: owner.url)
        configuration.probe = false
        let runtime = try await Runtime.open(configuration)
        #expect(server.lines.count == before)
        #expect(try await runtime.complete(chat("hi")).text == "answer to hi ")
        #expect(server.lines.count == before + 1)
    }

    @Test("a sample of the answers is asked again") func parity() async throws {
        let runtime = try await server.open { $0.parity = 9 }
        var changes = chat("count")
        changes.name = "changes"
        let results = await runtime.complete([chat("one"), changes, chat("two")])
        for result in results { _ = try result.get() }
        #expect(try runtime.summary().parity == nil)
        try await runtime.checkParity()
        #expect(try runtime.summary().parity
            == .init(checked: 3, identical: 2, different: 1, ids: ["changes"]))
        #expect(try runtime.summary().answered == 3)
        let plain = try await server.open()
        #expect(await failure { try await plain.checkParity() }?.code == .invalid)
    }

    @Test("two runtimes do not know each other") func two() async throws {
        let first = try await server.open()
        let other = try FakeServer()
        let second = try await other.open()
        #expect(first.url != second.url)
        await second.close()
        #expect(try await first.complete(chat("hi")).text == "answer to hi ")
        let borrowed = try await Runtime.open(Configuration(backend: "openai-url", url: first.url))
        #expect(try await borrowed.complete(chat("hi")).text == "answer to hi ")
        #expect(borrowed.model == "small")
    }

    @Test("a thread without tasks can open and close") func blocking() throws {
        let runtime = try Runtime(server.configuration())
        #expect(runtime.isRunning)
        runtime.close()
        runtime.close()
        #expect(!runtime.isRunning)
    }
}

@Suite struct ValueTests {
    @Test("messages and tools are read from a data set's lines") func codable() throws {
        struct Row: Codable { let messages: [Message]; let tools: [Tool] }
        let row = try JSON(#"""
            {"messages": [{"role": "user", "content": "a/b"},
              {"role": "assistant", "content": null, "tool_calls":
                [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]}],
             "tools": [{"type": "function", "function":
                {"name": "f", "parameters":
                    {"type": "object", "n": 1, "x": 1.5, "b": [true, null]}}}]}
            """#).decode(Row.self)
        #expect(row.messages[0] == .user("a/b"))
        #expect(row.messages[1].toolCalls?.first?.function.name == "f")
        #expect(row.tools[0].function.parameters.text
            == #"{"b":[true,null],"n":1,"type":"object","x":1.5}"#)
        #expect(try JSON(encoding: row.messages[0]).text == #"{"content":"a/b","role":"user"}"#)
        let again = try JSON(encoding: row).decode(Row.self)
        #expect(again.messages == row.messages && again.tools == row.tools)
    }

    @Test("JSON that was given as text stays as it is") func text() throws {
        let tool = Tool(name: "f\"", parameters: JSON(#"{"z": 1e2, "a": 0.10}"#))
        #expect(tool.json
            == #"{"type": "function", "function": {"name": "f\"", "#
            + #""parameters": {"z": 1e2, "a": 0.10}}}"#)
    }

    @Test("a time under a millisecond is not the default") func times() throws {
        #expect(try milliseconds(.microseconds(3), "x") == 1)
        #expect(try milliseconds(.seconds(2), "x") == 2000)
        #expect(try milliseconds(nil, "x") == 0)
        #expect(throws: EvalError.self) { try milliseconds(.seconds(5_000_000), "x") }
    }
}
