import EvalRT
import Foundation

/// What the command line says of the backend. Without any of these flags it is tinygpt, as ever.
public struct BackendChoice: Sendable {
    public static let usage = """
          --backend NAME           tinygpt (default), omlx, mlx-server or openai-url
          --backend-url URL        a running server, http://host:port/v1
          --backend-executable F   the program to start; default: the backend's, on PATH
          --max-in-flight N        requests at once; default: as many as the backend takes
          --journal FILE           keeps every answer; the same command asks only for the rest
        """

    public var backend = "tinygpt"
    public var url: String?
    public var executable: String?
    public var maxInFlight: Int?
    public var journal: String?

    public init() {}

    /// Takes its flags out of the arguments; nil: a flag has no value or a wrong one.
    public init?(taking arguments: inout [String]) {
        var rest: [String] = []
        var index = 0
        while index < arguments.count {
            let flag = arguments[index]
            let flags = ["--backend", "--backend-url", "--backend-executable", "--max-in-flight",
                         "--journal"]
            guard flags.contains(flag) else {
                rest.append(flag)
                index += 1
                continue
            }
            guard index + 1 < arguments.count else { return nil }
            let value = arguments[index + 1]
            index += 2
            switch flag {
            case "--backend": backend = value
            case "--backend-url": url = value
            case "--backend-executable": executable = value
            case "--journal": journal = value
            default:
                guard let number = Int(value), number > 0 else { return nil }
                maxInFlight = number
            }
        }
        arguments = rest
    }

    /// Of this process. Call sites that name no backend get it.
    public static let ofThisProcess: BackendChoice = {
        var arguments = CommandLine.arguments
        return BackendChoice(taking: &arguments) ?? BackendChoice()
    }()
}
