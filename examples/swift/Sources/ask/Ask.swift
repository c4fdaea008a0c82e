// Asks a model server one question:  ask http://127.0.0.1:8080/v1 "What is the capital of France?"
import EvalRT

@main struct Ask {
    static func main() async throws {
        let arguments = CommandLine.arguments
        guard arguments.count == 3 else { return print("usage: ask URL QUESTION") }
        let runtime = try await Runtime.open(.init(backend: "openai-url", url: arguments[1]))
        var request = Request.chat([.user(arguments[2])])
        request.maxTokens = 64
        for try await piece in runtime.stream(request) { print(piece, terminator: "") }
        print()
        await runtime.close()
    }
}
