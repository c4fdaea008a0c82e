// The order of a whole suite, and its cut into shards, before anything is asked.
#ifndef EVALRT_PROGRAM_PLAN_HPP
#define EVALRT_PROGRAM_PLAN_HPP

#include "evalrt/detail/journal_core.hpp"
#include "evalrt/detail/shards.hpp"
#include "evalrt/runtime.hpp"

#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace evalrt::program {

struct Plan {
    std::vector<std::uint32_t> order;     ///< places in the suite
    std::vector<detail::ShardItem> items; ///< in this order; costs in bytes of prompt
    std::uint64_t prompt_bytes = 0, cold_bytes = 0, output_tokens = 0;
    std::uint64_t unbounded = 0; ///< requests that say nothing of how long their answers may be
};

/// As RequestScheduler would send them one at a time. `request(i)`: null for one that cannot be
/// asked, which is in no order; it is only used until the next call.
Plan plan(std::size_t count, const std::function<const Request*(std::size_t)>& request,
          const RuntimeOptions& options);

/// In text, and in JSON.
struct DryRun {
    std::size_t requests = 0, skipped = 0, repeated = 0; ///< of these the latter are not asked
    std::uint64_t input_bytes = 0;
    double seconds = 0; ///< that reading and planning took
    std::size_t shards = 1;
};
std::string dry_run_text(const Plan& plan, const detail::Shards& shards, const DryRun& run);
std::string dry_run_json(const Plan& plan, const detail::Shards& shards, const DryRun& run);

/// The places of a shard, in the order of the suite.
std::vector<std::size_t> shard_places(const Plan& plan, const detail::Shards& shards,
                                      std::size_t shard);

/// Another one where the suite is cut otherwise: other items, another order, other places.
/// `id(i)`: of the item i of the suite.
std::string cut_name(const Plan& plan, const detail::Shards& shards,
                     const std::function<std::string_view(std::size_t)>& id);

/// Of what is in a suite, whatever its file is called: its items' names, endpoints and bodies, as
/// they are added.
class SuiteContent {
public:
    explicit SuiteContent(std::string_view kind);
    void add(std::string_view id, const Request& request);
    std::string digest() const;

private:
    detail::JournalKey key_;
};

/// "shard 2 of 8 (from 0): ..."
std::string shard_line(const Plan& plan, const detail::Shards& shards, std::size_t shard);

/// How much memory this process has used at most, in MB.
double megabytes_used();

} // namespace evalrt::program

#endif
