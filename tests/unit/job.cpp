#include "job.hpp"

#include "support/catch.hpp"

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

using namespace evalrt::detail;

namespace {

// Operations that the test ends when it wants, or drops.
struct Owner : std::enable_shared_from_this<Owner> {
    explicit Owner(bool& gone) : gone_(gone) {}
    ~Owner() {
        job.reset();
        gone_ = true;
    }

    auto next() {
        return operation<int>(shared_from_this(), [this](auto handler) {
            auto shared = std::make_shared<decltype(handler)>(std::move(handler));
            pending = [shared](int value) { (*shared)(value); };
        });
    }
    static void end(std::shared_ptr<Owner>& owner, int value) {
        auto call = std::exchange(owner->pending, nullptr);
        owner.reset(); // the operation alone keeps it
        call(value);
    }

    std::function<void(int)> pending;
    std::vector<int> seen;
    std::optional<Job<>> job;

private:
    bool& gone_;
};

struct Mark {
    int& count;
    explicit Mark(int& count_) : count(count_) { ++count; }
    ~Mark() { --count; }
};

Job<int> twice(Owner& owner, int& frames) {
    const Mark mark(frames);
    auto [first] = co_await owner.next();
    auto [second] = co_await owner.next();
    if (second < 0) throw std::runtime_error("below zero");
    co_return first + second;
}

Job<> sums(Owner& owner, int& frames, std::vector<int>& sums_seen, std::string& error) {
    const Mark mark(frames);
    try {
        for (;;) {
            const int sum = co_await twice(owner, frames);
            sums_seen.push_back(sum);
        }
    } catch (const std::runtime_error& failure) {
        error = failure.what();
    }
}

} // namespace

TEST_CASE("a job waits for operations and for other jobs, and takes their exceptions") {
    bool gone = false;
    int frames = 0;
    std::vector<int> seen;
    std::string error;
    auto owner = std::make_shared<Owner>(gone);
    std::weak_ptr<Owner> weak = owner;
    owner->job.emplace(sums(*owner, frames, seen, error));
    CHECK(frames == 0); // it has not begun
    owner->job->start();
    CHECK(frames == 2);
    for (const int value : {1, 2, 3, 4, 5, -1}) {
        Owner::end(owner, value);
        owner = weak.lock();
        REQUIRE((owner || value == -1));
    }
    CHECK(seen == std::vector{3, 7});
    CHECK(error == "below zero");
    CHECK(frames == 0);
    CHECK(gone);
}

TEST_CASE("an operation that is dropped takes the job with it") {
    bool gone = false;
    int frames = 0;
    std::vector<int> seen;
    std::string error;
    auto owner = std::make_shared<Owner>(gone);
    owner->job.emplace(sums(*owner, frames, seen, error));
    owner->job->start();
    auto call = std::exchange(owner->pending, nullptr);
    owner.reset();
    CHECK_FALSE(gone);
    CHECK(frames == 2);
    call = nullptr;
    CHECK(gone);
    CHECK(frames == 0);
    CHECK(error.empty());
}

TEST_CASE("an exception that nobody takes leaves through whoever resumed the job") {
    const auto thrower = []() -> Job<> {
        throw std::runtime_error("out");
        co_return;
    };
    auto job = thrower();
    CHECK_THROWS_WITH(job.start(), "out");
}

TEST_CASE("spare memory is handed out once") {
    std::set<void*> taken;
    for (int round = 0; round < 3; ++round) {
        for (const std::size_t size : {1u, 256u, 257u, 5000u, 100'000u})
            for (int i = 0; i < 300; ++i) {
                void* const memory = SpareMemory::take(size);
                CHECK(taken.insert(memory).second);
                static_cast<char*>(memory)[size - 1] = 1;
                if (i % 3 != 0) continue;
                taken.erase(memory);
                SpareMemory::give(memory, size);
            }
        for (void* const memory : taken) static_cast<void>(memory);
    }
    for (void* const memory : taken) ::operator delete(memory);
}

TEST_CASE("a pool hands out what is its own, and gives back what nobody uses") {
    Pool pool;
    for (const std::size_t size : {1u, 32u, 33u, 400u, 2048u, 2049u, 100'000u}) {
        CAPTURE(size);
        std::map<char*, int> taken; // and what is written there
        const auto check = [&] {
            for (const auto& [memory, mark] : taken) {
                CHECK(memory[0] == char(mark));
                CHECK(memory[size - 1] == char(mark));
            }
        };
        for (int round = 0; round < 3; ++round) {
            for (int i = 0; i < 1000; ++i) {
                auto* const memory = static_cast<char*>(pool.take(size));
                CHECK(reinterpret_cast<std::uintptr_t>(memory) % alignof(std::max_align_t) == 0);
                CHECK(taken.emplace(memory, i).second);
                memory[0] = memory[size - 1] = char(i);
            }
            check();
            for (auto it = taken.begin(); it != taken.end();) { // from everywhere
                if (it->second % 3 == round) {
                    ++it;
                    continue;
                }
                pool.give(it->first, size);
                it = taken.erase(it);
            }
            check();
        }
        if (own_memory && size <= 2048) CHECK(pool.slabs() > 1);
        for (const auto& [memory, mark] : taken) pool.give(memory, size);
        CHECK(pool.slabs() <= 5); // one of each size
    }
}
