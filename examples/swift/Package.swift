// swift-tools-version: 6.0
import PackageDescription

let package = Package(
    name: "EvalHarness",
    platforms: [.macOS(.v13)],
    dependencies: [.package(path: "EvalRT")],
    targets: [
        .target(name: "EvalHarness", dependencies: [.product(name: "EvalRT", package: "EvalRT")]),
        .executableTarget(name: "ask", dependencies: [.product(name: "EvalRT", package: "EvalRT")]),
        .executableTarget(name: "eval-harness", dependencies: ["EvalHarness"]),
        .testTarget(name: "EvalHarnessTests", dependencies: ["EvalHarness"]),
    ],
    swiftLanguageModes: [.v6]
)
