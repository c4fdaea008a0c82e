import Foundation
import Testing

@testable import EvalRT

/// tests/support/fake_openai.py, which starts like mlx_lm.server, with a log of its own.
final class FakeServer: Sendable {
    let folder: URL
    var executable: URL { folder.appendingPathComponent("server") }
    private var log: URL { folder.appendingPathComponent("server.log") }

    init() throws {
        folder = FileManager.default.temporaryDirectory
            .appendingPathComponent("evalrt-swift-\(UUID().uuidString)")
        try FileManager.default.createDirectory(at: folder, withIntermediateDirectories: true)
        let script = URL(fileURLWithPath: #filePath)
            .appendingPathComponent("../../../../../tests/support/fake_openai.py").standardized
        try FileManager.default.createSymbolicLink(at: executable, withDestinationURL: script)
    }

    deinit { try? FileManager.default.removeItem(at: folder) }

    func configuration(model: String = "small") -> Configuration {
        var it = Configuration(backend: "mlx-server", model: model)
        it.executable = executable.path
        return it
    }

    func open(_ change: (inout Configuration) -> Void = { _ in }) async throws -> Runtime {
        var configuration = configuration()
        change(&configuration)
        return try await Runtime.open(configuration)
    }

    /// What the server was asked and saw, a JSON object a line.
    var lines: [String] {
        ((try? String(contentsOf: log, encoding: .utf8)) ?? "")
            .split(separator: "\n").map(String.init)
    }

    /// Waits until a line has these words.
    func waits(for words: String) async -> Bool {
        for _ in 0..<30000 {
            if lines.contains(where: { $0.contains(words) }) { return true }
            try? await Task.sleep(for: .milliseconds(10))
        }
        return false
    }
}

func chat(_ question: String) -> Request { .chat([.user(question)]) }

/// What it throws, if that is an EvalError.
func failure(_ run: () async throws -> Void) async -> EvalError? {
    do {
        try await run()
    } catch {
        return error as? EvalError
    }
    return nil
}
