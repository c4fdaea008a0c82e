// Asks a model server one question:  ask http://127.0.0.1:8080/v1 "What is the capital of France?"
#include <evalrt/evalrt.hpp>

#include <boost/asio/io_context.hpp>
#include <boost/json/object.hpp>
#include <boost/json/serialize.hpp>

#include <iostream>

int main(int argc, char** argv) {
    if (argc != 3) return std::cerr << "usage: ask URL QUESTION\n", 2;
    boost::asio::io_context io;
    evalrt::RuntimeOptions options;
    options.backend = "openai-url";
    options.url = argv[1];
    evalrt::Runtime runtime(io.get_executor(), options);
    evalrt::Request request;
    boost::json::object message{{"role", "user"}, {"content", argv[2]}};
    request.body = serialize(boost::json::object{{"messages", {message}}, {"max_tokens", 64}});
    int code = 1;
    runtime.async_open([&](evalrt::error_code ec, std::string why) {
        if (ec) return void(std::cerr << why << '\n');
        runtime.backend().async_complete(
            request, {}, [&](evalrt::error_code failed, evalrt::Response response) {
                std::cout << (failed ? response.detail : response.text) << '\n';
                code = failed ? 1 : 0;
            });
    });
    io.run();
    return code;
}
