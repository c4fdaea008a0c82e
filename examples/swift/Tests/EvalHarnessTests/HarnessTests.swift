import EvalRT
import Foundation
import Testing

@testable import EvalHarness

private let support = URL(fileURLWithPath: #filePath)
    .appendingPathComponent("../../../../../tests/support").standardized

/// Where the package's programs are.
private let bin = ProcessInfo.processInfo.environment["EVALRT_TEST_BIN"]

/// A folder of its own, and in it stand-ins for the servers that log what they are asked.
private final class Folder {
    let url: URL

    init() throws {
        url = FileManager.default.temporaryDirectory
            .appendingPathComponent("evalrt-harness-\(UUID().uuidString)")
        try FileManager.default.createDirectory(at: url, withIntermediateDirectories: true)
    }

    deinit { try? FileManager.default.removeItem(at: url) }

    func write(_ text: String, to name: String) throws -> String {
        let file = url.appendingPathComponent(name)
        try FileManager.default.createDirectory(at: file.deletingLastPathComponent(),
                                                withIntermediateDirectories: true)
        try text.write(to: file, atomically: true, encoding: .utf8)
        return file.path
    }

    func standIn(_ script: String) throws -> String {
        let server = url.appendingPathComponent("server")
        try FileManager.default.createSymbolicLink(
            at: server, withDestinationURL: support.appendingPathComponent(script))
        return server.path
    }

    struct Line: Decodable {
        let argv: [String]?
        let path: String?
        let text: String?
        let in_flight: Int?
    }

    var log: [Line] {
        let text = try? String(contentsOf: url.appendingPathComponent("server.log"), encoding: .utf8)
        return (text ?? "").split(separator: "\n")
            .compactMap { try? JSON(String($0)).decode(Line.self) }
    }
}

/// With a port that is free, as far as one can know.
private func start(_ model: String, _ backend: BackendChoice) throws -> (Serve, Int) {
    var tries = 0
    while true {
        let port = Int.random(in: 20000..<32000)
        do {
            let serve = try EvalHarnessSupport.start(modelPath: model, port: port, backend: backend)
            return (serve, port)
        } catch {
            tries += 1
            guard tries < 5, error.code != .invalid || error.message.contains("gateway")
            else { throw error }
        }
    }
}

@Suite(.timeLimit(.minutes(60))) struct HarnessTests {
    private let folder: Folder
    init() throws { folder = try Folder() }

    @Test("without a flag tinygpt gets the arguments and bytes that it always got")
    func defaults() throws {
        let model = try folder.write("", to: "model.tinygpt")
        var none: [String] = []
        var choice = try #require(BackendChoice(taking: &none))
        #expect(choice.backend == "tinygpt")
        choice.executable = try folder.standIn("fake_tinygpt.py")
        let (serve, port) = try start(model, choice)
        #expect(serve.model == "tinygpt" && serve.baseURL == "http://127.0.0.1:\(port)/v1")
        let warmUp = folder.log.count

        let prompt = "def f(a):\n    \"\"\"Halves a/b, \u{e9}\u{1F600}.\"\"\"\n"
        let text = EvalHarnessSupport.completion(baseURL: "http://127.0.0.1:\(port)/v1",
                                                 prompt: prompt, maxTokens: 3)
        #expect(text == "word word word")
        _ = EvalHarnessSupport.completion(baseURL: serve.baseURL, prompt: "x", temperature: 0.7)
        serve.terminate()

        #expect(folder.log.compactMap(\.argv) == [["serve", model, "--host", "127.0.0.1", "--port",
                                                   "\(port)", "--max-context", "4096"]])
        // As the harness's own JSONSerialization writes it, whose order of members is by chance.
        for (line, (prompt, tokens, temperature)) in zip(
            folder.log.dropFirst(warmUp), [(prompt, 3, 0.0), ("x", 128, 0.7)]) {
            let body: [String: Any] = ["model": "tinygpt", "prompt": prompt, "max_tokens": tokens,
                                       "temperature": temperature]
            let bytes = try JSONSerialization.data(withJSONObject: body, options: .sortedKeys)
            #expect(line.path == "/v1/completions")
            #expect(line.text == String(decoding: bytes, as: UTF8.self))
        }
        #expect(folder.log.count == warmUp + 2)
        #expect(folder.log.last?.text
            == #"{"max_tokens":128,"model":"tinygpt","prompt":"x","temperature":0.7}"#)
    }

    @Test("the call sites stay as they are") func callSites() throws {
        let model = try folder.write("", to: "model.tinygpt")
        var choice = BackendChoice()
        choice.executable = try folder.standIn("fake_tinygpt.py")
        let (first, port) = try start(model, choice)
        first.terminate()
        #expect(!first.isRunning)

        var common = EvalHarnessSupport.Common(modelPath: model)
        common.servePort = port
        func callSite() -> String {
            let serve = EvalHarnessSupport.startServe(modelPath: model, port: common.servePort,
                                                      backend: choice)
            defer { if serve.isRunning { serve.terminate() } }
            let base = "http://127.0.0.1:\(common.servePort)/v1"
            return EvalHarnessSupport.completion(baseURL: base, prompt: "p", maxTokens: 2) ?? ""
        }
        #expect(callSite() == "word word")
        #expect(EvalHarnessSupport.completion(baseURL: "http://127.0.0.1:\(port)/v1", prompt: "p")
            == nil)
        // Its type checks with the default choice, too.
        let _: (String, Int) -> Serve = { EvalHarnessSupport.startServe(modelPath: $0, port: $1) }
    }

    @Test("a failure is no answer") func failures() throws {
        let model = try folder.write("", to: "model.tinygpt")
        var choice = BackendChoice()
        choice.executable = try folder.standIn("fake_openai.py")
        choice.backend = "mlx-server"
        let (serve, _) = try start(model, choice)
        defer { serve.terminate() }
        let base = serve.baseURL
        #expect(EvalHarnessSupport.completion(baseURL: base, prompt: "fail") == nil)
        #expect(EvalHarnessSupport.completion(baseURL: base, prompt: "p") == "answer to p")
    }

    @Test("the port of the call site leads programs of others to any backend")
    func children() async throws {
        let model = try folder.write("", to: "model")
        var choice = BackendChoice()
        choice.executable = try folder.standIn("fake_openai.py")
        choice.backend = "mlx-server"
        choice.maxInFlight = 2
        let (serve, port) = try start(model, choice)
        #expect(serve.baseURL == "http://127.0.0.1:\(port)/v1")
        let client = support.appendingPathComponent("../capi/gateway_client.py").standardized.path
        let (code, out, _) = try await run(URL(fileURLWithPath: "/usr/bin/env"), [
            "python3", client, serve.baseURL, "no token", "one", "meet 2", "two",
        ])
        #expect(code == 0 && out == "answer to one \nanswer to meet 2 \nanswer to two \n")
        #expect(try serve.runtime.summary().answered == 3)
        #expect(folder.log.compactMap(\.in_flight).max() == 2)
        await serve.runtime.close()
    }

    @Test("flags choose the backend, and the others pass") func flags() throws {
        let (common, rest) = EvalHarnessSupport.parseCommon(
            ["m.tinygpt", "--backend", "omlx", "--out", "o", "--max-in-flight", "4", "--limit", "3",
             "--suites", "a,b", "--baseline", "--odd", "--serve-port", "9"],
            usage: { fatalError("usage") })
        #expect(common.modelPath == "m.tinygpt" && common.outJsonl == "o" && common.limit == 3)
        #expect(common.baseline && common.servePort == 9)
        #expect(rest == ["--suites", "a,b", "--odd"])
        var arguments = ["--backend", "openai-url", "x", "--backend-url", "http://h/v1",
                         "--max-in-flight", "4"]
        let choice = try #require(BackendChoice(taking: &arguments))
        #expect(choice.backend == "openai-url" && choice.url == "http://h/v1")
        #expect(choice.maxInFlight == 4 && arguments == ["x"])
        for wrong in [["--backend"], ["--max-in-flight", "0"], ["--max-in-flight", "many"]] {
            var arguments = wrong
            #expect(BackendChoice(taking: &arguments) == nil)
        }
    }

    @Test("an unknown backend is refused with the list of the known") func unknown() throws {
        var choice = BackendChoice()
        choice.backend = "nosuch"
        let error = #expect(throws: EvalError.self) {
            try EvalHarnessSupport.start(modelPath: "m", port: 1, backend: choice)
        }
        for name in ["tinygpt", "omlx", "mlx-server", "openai-url"] {
            #expect(error?.message.contains(name) == true)
        }
    }

    @Test("scores are rows of the harness's own schema") func rows() throws {
        let out = folder.url.appendingPathComponent("rows.jsonl").path
        let common = EvalHarnessSupport.Common(modelPath: "/m/Small-1B.tinygpt", outJsonl: out,
                                               modelStep: 7)
        for score in [0.5, 0.25] {
            EvalHarnessSupport.appendRow(common: common, task: "bfcl", subtask: "bfcl/simple",
                                         metric: "accuracy", score: score, n: 8, wall: 1.5,
                                         harness: "v")
        }
        let lines = try String(contentsOfFile: out, encoding: .utf8).split(separator: "\n")
        #expect(lines.count == 2)
        let row = try JSON(String(lines[1])).decode(Row.self)
        #expect(row.model_name == "Small-1B" && row.model_step == 7 && row.score == 0.25)
        let members = try #require(
            try JSONSerialization.jsonObject(with: Data(lines[0].utf8)) as? [String: Any])
        #expect(Set(members.keys) == [
            "run_id", "model_path", "model_name", "model_step", "baseline", "task", "subtask",
            "metric", "score", "n_examples", "wall_seconds", "timestamp", "harness_version",
        ])
    }

    private func writeSuite() throws -> MiniBFCL {
        let questions = ["quick", "fail", "third"].map {
            #"{"id": "\#($0)", "question": [[{"role": "user", "content": "\#($0)"}]], "#
                + #""function": [{"name": "f", "parameters": {"z": 1, "a": 2}}]}"#
        }
        let answers = ["third", "fail", "quick"].map {
            #"{"id": "\#($0)", "ground_truth": [{"f": {"a": [1]}}]}"#
        }
        _ = try folder.write(questions.joined(separator: "\n"), to: "BFCL_v4_mini.json")
        _ = try folder.write(answers.joined(separator: "\n"),
                             to: "possible_answer/BFCL_v4_mini.json")
        return try MiniBFCL(category: "mini", data: folder.url, limit: 0)
    }

    @Test("a suite runs at once, and one at a time, with the same answers") func suite()
        async throws {
        let suite = try writeSuite()
        #expect(suite.cases.map(\.id) == ["quick", "fail", "third"])
        #expect(suite.cases[0].messages[0].content!
            .hasSuffix(#" [{"name": "f", "parameters": {"z": 1, "a": 2}}]"#))
        let model = try folder.write("", to: "model")
        var choice = BackendChoice()
        choice.backend = "mlx-server"
        choice.executable = try folder.standIn("fake_openai.py")
        let requests = suite.requests(maxTokens: 9)
        let (serve, _) = try start(model, choice)
        let before = try await Pass.oneAtATime(requests, serve)
        let after = try await Pass.atOnce(requests, serve)
        for pass in [before, after] {
            #expect(pass.answered == 2 && pass.right(suite) == 0)
            #expect(try pass.results[0].get().text == "answer to quick ")
            #expect(try pass.results[2].get().text == "answer to third ")
        }
        #expect(after.summary.answered == 4 && after.summary.failed == 2)
        await serve.runtime.close()
        #expect(throws: MiniBFCL.Problem.self) {
            try MiniBFCL(category: "nosuch", data: folder.url, limit: 0)
        }
    }

    /// Waits for a program's end without keeping a thread of the tests' pool.
    private func run(_ program: URL, _ arguments: [String]) async throws -> (Int32, String, String) {
        let process = Process()
        process.executableURL = program
        process.arguments = arguments
        let out = folder.url.appendingPathComponent("out")
        let err = folder.url.appendingPathComponent("err")
        for file in [out, err] { try Data().write(to: file) }
        process.standardOutput = try FileHandle(forWritingTo: out)
        process.standardError = try FileHandle(forWritingTo: err)
        let code = try await withCheckedThrowingContinuation { continuation in
            process.terminationHandler = { continuation.resume(returning: $0.terminationStatus) }
            do { try process.run() } catch { continuation.resume(throwing: error) }
        }
        return (code, try String(contentsOf: out, encoding: .utf8),
                try String(contentsOf: err, encoding: .utf8))
    }

    @Test("the programs do what they say", .enabled(if: bin != nil, "EVALRT_TEST_BIN is not set"))
    func programs() async throws {
        _ = try writeSuite()
        let model = try folder.write("", to: "model")
        var choice = BackendChoice()
        choice.backend = "mlx-server"
        choice.executable = try folder.standIn("fake_openai.py")
        let (serve, _) = try start(model, choice)
        let programs = URL(fileURLWithPath: bin!)
        let ask = programs.appendingPathComponent("ask")
        let (asked, answer, _) = try await run(ask, [serve.baseURL, "hi"])
        #expect(asked == 0 && answer == "answer to hi \n")
        await serve.runtime.close()

        let rows = folder.url.appendingPathComponent("rows").path
        let harness = programs.appendingPathComponent("eval-harness")
        let (code, out, err) = try await run(harness, [
            model, "--bfcl-data", folder.url.path, "--category", "mini", "--out", rows,
            "--backend", "mlx-server", "--backend-executable", choice.executable!,
            "--max-in-flight", "3", "--serve-port", "\(Int.random(in: 20000..<32000))",
        ])
        #expect(code == 1, "one of the three is refused")
        #expect(out.contains("one at a time: 2 of 3 answered, 0 right"))
        #expect(out.contains("all at once: 2 of 3 answered, 0 right"))
        #expect(out.contains("3 in flight"))
        #expect(out.contains("speed-up: "))
        #expect(err.contains("prefix cached: "))
        let row = try JSON(String(contentsOfFile: rows, encoding: .utf8)).decode(Row.self)
        #expect(row.subtask == "bfcl/mini" && row.n_examples == 2)
        #expect(folder.log.compactMap(\.path).count >= 2 * 3)
    }

    @Test("calls are checked by their values", arguments: [
        (#"[m.f(a=1, b="x, y")]"#, true), (#"m.f(b='X, Y', a=1.0)"#, true),
        (#"[m.f(a=1, b="x, y", c=[1, 'q'])]"#, true), (#"[m.f(a=2, b="x, y")]"#, false),
        (#"[m.f(b="x, y")]"#, false), (#"[m.f(a=1, b="x, y", d=1)]"#, false),
        (#"[m.f(a=1, b="x, y"), m.f(a=1, b="x, y")]"#, false), (#"[g(a=1, b="x, y")]"#, false),
        (#"[m.f(a=1, b=x)]"#, false), ("I would call m.f", false), ("m.f(a=1", false), ("", false),
        (#"[m.f(1, b="x, y")]"#, false),
    ]) func checker(text: String, right: Bool) throws {
        let truth = [["m.f": ["a": [JSON("1")], "b": [JSON("\"x, y\"")],
                              "c": [JSON("\"\""), JSON(#"[1,"q"]"#)]]]]
        #expect(MiniBFCL.isRight(text, truth) == right)
    }
}
