// What evalrt makes of BFCL's rows and answers, on stdout, for bfcl_wire.py to compare with the
// real bfcl_eval:
//   bfcl_bodies DIR CATEGORY prompt|fc MODEL      one request body a line, in the rows' order
//   bfcl_bodies row ID prompt|fc LATENCY          the result row of the answer on stdin
//   bfcl_bodies write FILE                        writes the result file of the rows on stdin
#include "examples/evalrt/bfcl.hpp"

#include <boost/json.hpp>

#include <iostream>
#include <iterator>
#include <string>
#include <vector>

namespace bfcl = evalrt::bfcl;

namespace {

int fail(const evalrt::Failure& failure) {
    std::cerr << failure.detail << '\n';
    return 1;
}

bfcl::Mode mode(const std::string& name) {
    return name == "fc" ? bfcl::Mode::fc : bfcl::Mode::prompt;
}

int bodies(const std::string& dir, const std::string& category, bfcl::Options options) {
    auto items = bfcl::load(dir, category);
    if (!items) return fail(items.error());
    for (const auto& item : *items) {
        auto body = bfcl::body(item, options);
        if (!body) return fail(body.error());
        std::cout << *body << '\n';
    }
    return 0;
}

int row(const std::string& id, const std::string& mode_name, const std::string& latency) {
    evalrt::Response response;
    response.body.assign(std::istreambuf_iterator<char>(std::cin), {});
    auto usage = boost::json::parse(response.body).at("usage");
    response.usage.prompt_tokens = usage.at("prompt_tokens").to_number<std::int64_t>();
    response.usage.completion_tokens = usage.at("completion_tokens").to_number<std::int64_t>();
    std::chrono::duration<double> seconds(std::stod(latency));
    auto made = bfcl::result_row({id, {}}, response, seconds, mode(mode_name));
    if (!made) return fail(made.error());
    std::cout << made->text << '\n';
    return 0;
}

int write(const std::string& path) {
    std::vector<bfcl::Row> rows;
    for (std::string line; std::getline(std::cin, line);)
        rows.push_back({boost::json::parse(line).at("id").as_string().c_str(), line});
    auto failure = bfcl::write_results(path, std::move(rows));
    return failure ? fail(failure) : 0;
}

} // namespace

int main(int argc, char** argv) {
    std::ios::sync_with_stdio(false);
    std::vector<std::string> args(argv + 1, argv + argc);
    if (args.size() == 4 && args[0] == "row") return row(args[1], args[2], args[3]);
    if (args.size() == 2 && args[0] == "write") return write(args[1]);
    if (args.size() == 4)
        return bodies(args[0], args[1], {.mode = mode(args[2]), .model = args[3]});
    std::cerr << "usage: bfcl_bodies DIR CATEGORY prompt|fc MODEL\n";
    return 2;
}
