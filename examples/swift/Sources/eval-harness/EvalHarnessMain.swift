import EvalHarness
import Foundation

/// Runs some BFCL rows as the harness always has, one at a time, and then all at once, each time
/// on a server of its own, and says how much faster that is.
@main struct EvalHarnessMain {
    static func usage() -> Never {
        print("""
            usage: eval-harness MODEL --bfcl-data DIR [options]
              --out FILE               appends the scores, a JSON object a line
              --category NAME          default simple_python
              --limit N                default 16
              --max-tokens N           default 64
              --serve-port N           default 8097
              --model-name NAME, --model-step N, --baseline
            \(BackendChoice.usage)
            """)
        exit(2)
    }

    static func main() async throws {
        var (common, rest) = EvalHarnessSupport.parseCommon(
            Array(CommandLine.arguments.dropFirst()), usage: usage)
        var data: String?, category = "simple_python", maxTokens = 64
        while rest.count > 1 {
            switch rest[0] {
            case "--bfcl-data": data = rest[1]
            case "--category": category = rest[1]
            case "--max-tokens": maxTokens = Int(rest[1]) ?? 0
            default: usage()
            }
            rest.removeFirst(2)
        }
        if common.limit == 0 { common.limit = 16 }
        guard rest.isEmpty, maxTokens > 0, let data, let model = common.modelPath else { usage() }
        let suite: MiniBFCL
        do {
            suite = try MiniBFCL(category: category, data: URL(fileURLWithPath: data),
                                 limit: common.limit)
        } catch {
            print("\(error)")
            exit(2)
        }
        let requests = suite.requests(maxTokens: maxTokens)

        var single = BackendChoice.ofThisProcess
        single.maxInFlight = 1
        single.journal = nil // it is timed
        let before = try await run(model, common, single) {
            try await Pass.oneAtATime(requests, $0)
        }
        let after = try await run(model, common, .ofThisProcess) {
            try await Pass.atOnce(requests, $0)
        }

        for (name, pass) in [("one at a time", before), ("all at once", after)] {
            print("\(name): \(pass.answered) of \(requests.count) answered, "
                + "\(pass.right(suite)) right, \(seconds(pass.wall)) s, "
                + "\(pass.summary.maxInFlight ?? 1) in flight")
        }
        let same = zip(before.results, after.results)
            .count { (try? $0.get().text) == (try? $1.get().text) }
        print("the same answer: \(same) of \(requests.count)")
        print("speed-up: \(seconds(before.wall / after.wall))x")

        let score = after.answered > 0 ? Double(after.right(suite)) / Double(after.answered) : 0
        EvalHarnessSupport.appendRow(common: common, task: "bfcl", subtask: "bfcl/\(category)",
                                     metric: "accuracy", score: score, n: after.answered,
                                     wall: after.wall, harness: "evalrt-mini")
        exit(before.answered == requests.count && after.answered == requests.count ? 0 : 1)
    }

    static func seconds(_ value: Double) -> String { String(format: "%.2f", value) }

    static func run(_ model: String, _ common: EvalHarnessSupport.Common, _ backend: BackendChoice,
                    _ pass: @Sendable (Serve) async throws -> Pass) async throws -> Pass {
        let serve = EvalHarnessSupport.startServe(modelPath: model, port: common.servePort,
                                                  backend: backend)
        defer { if serve.isRunning { serve.terminate() } }
        return try await pass(serve)
    }
}
