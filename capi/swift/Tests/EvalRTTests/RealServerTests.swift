import Foundation
import Testing

@testable import EvalRT

private let environment = ProcessInfo.processInfo.environment

private let model = environment["EVALRT_TEST_MODEL"]
private let program = environment["EVALRT_TEST_SERVER"]

/// The real mlx_lm.server (EVALRT_TEST_SERVER) with a real model (EVALRT_TEST_MODEL).
@Suite(.enabled(if: program != nil && model != nil,
                "EVALRT_TEST_SERVER and EVALRT_TEST_MODEL are not set"),
       .timeLimit(.minutes(60)))
struct RealServerTests {
    @Test("a real model answers, streams, batches, reuses prefixes and is interrupted")
    func real() async throws {
        var configuration = Configuration(backend: "mlx-server", model: model)
        configuration.executable = program
        configuration.gateway = .init()
        configuration.parity = 3
        let runtime = try await Runtime.open(configuration)
        var request = chat("What is the capital of France? Answer in one word.")
        request.maxTokens = 12

        let answer = try await runtime.complete(request)
        #expect(!answer.text.isEmpty && answer.usage.promptTokens! > 5)
        var streamed = ""
        for try await piece in runtime.stream(request) { streamed += piece }
        #expect(streamed == answer.text)

        let rules = String(repeating: "Answer with one word and nothing else. ", count: 30)
        let results = await runtime.complete((0..<8).map { number in
            var it = Request.chat([.system(rules), .user("What is \(number) + 1?")])
            it.maxTokens = 8
            return it
        })
        for result in results { #expect(!(try result.get().text.isEmpty)) }
        let summary = try runtime.summary()
        #expect(summary.answered == 10 && summary.failed == 0)
        #expect(summary.inFlightMean! > 1)
        #expect(summary.cachedTokens.actual! > 7 * 100)

        try await runtime.checkParity()
        #expect(try runtime.summary().parity?.checked == 3)

        var address = Configuration(backend: "openai-url", url: runtime.url)
        address.wire = .anthropic
        address.probe = false
        let other = try await Runtime.open(address)
        #expect(try await other.complete(request).text == answer.text)
        await other.close()
        #expect(try runtime.summary().answered == 11)

        var endless = chat("Count from one to ten thousand.")
        endless.maxTokens = 4000
        let begun = Locked(false)
        let task = Task { [endless] in
            try await runtime.complete(endless) { _ in begun.with { $0 = true } }
        }
        while !begun.with({ $0 }) { try await Task.sleep(for: .milliseconds(20)) }
        task.cancel()
        await #expect(throws: EvalError.self) { try await task.value }
        #expect(try await runtime.complete(request).text == answer.text)
        await runtime.close()
    }
}
