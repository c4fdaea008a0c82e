// swift-tools-version: 6.0
// Needs the installed library: pkg-config must find evalrt_c (PKG_CONFIG_PATH), the loader
// libevalrt_c (LD_LIBRARY_PATH on Linux). SwiftPM does not notice when the installed header has
// changed: delete the build folder then.
import PackageDescription

let package = Package(
    name: "EvalRT",
    platforms: [.macOS(.v13)],
    products: [.library(name: "EvalRT", targets: ["EvalRT"])],
    targets: [
        .systemLibrary(name: "CEvalRT", pkgConfig: "evalrt_c"),
        .target(name: "EvalRT", dependencies: ["CEvalRT"]),
        .testTarget(name: "EvalRTTests", dependencies: ["EvalRT"]),
    ],
    swiftLanguageModes: [.v6]
)
