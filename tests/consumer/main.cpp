#include <evalrt/evalrt.hpp>

#include <boost/asio/io_context.hpp>

#include <cstdio>

int main() {
    boost::asio::io_context io;
    evalrt::HttpOptions options;
    options.url = "http://127.0.0.1:1/v1"; // nothing answers there
    evalrt::HttpBackend http(io.get_executor(), *evalrt::find_backend_row("openai-url"), options);
    evalrt::RadixPlanner planner;
    evalrt::RequestScheduler scheduler(http, planner, *evalrt::find_backend_row("openai-url"), {});
    evalrt::Request request;
    request.body = R"({"messages": [{"role": "user", "content": "Hi"}]})";
    int code = 1;
    scheduler.async_complete(request, {}, [&](evalrt::error_code ec, evalrt::Response response) {
        std::printf("%s: %s\n", ec.message().c_str(), response.detail.c_str());
        code = ec == evalrt::Errc::unreachable ? 0 : 1;
    });
    io.run();
    return code;
}
