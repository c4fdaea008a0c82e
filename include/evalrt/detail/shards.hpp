// Shards: a planned order cut into contiguous runs of equal predicted cost.
#ifndef EVALRT_DETAIL_SHARDS_HPP
#define EVALRT_DETAIL_SHARDS_HPP

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace evalrt::detail {

/// An item of an order, as a cut sees it. Any unit, the same for both.
struct ShardItem {
    std::uint64_t cost = 0;   ///< of computing it where it stands
    std::uint64_t shared = 0; ///< that it has in common with what stands before it, and costs
                              ///< nothing there: a cut in front of it computes this once more
    bool continues = false;   ///< the conversation of the one before: no cut in front of it
};

/// In a depth-first order nothing behind a cut has more in common with what stands before the cut
/// than the first item behind it has. So a cut moves a little from the place of equal cost to where
/// this is least, by an eighth of a run at most; out of a conversation, to where that begins.
class Shards {
public:
    Shards() = default;
    Shards(const std::vector<ShardItem>& order, std::size_t count) {
        std::vector<std::uint64_t> before{0}; // cost of all that stands before
        before.reserve(order.size() + 1);
        for (const auto& it : order) before.push_back(before.back() + it.cost);
        const auto total = before.back();
        const auto share = count > 0 ? double(total) / double(count) : 0;
        const auto place = [&](double cost) {
            const auto at = std::lower_bound(before.begin(), before.end(), cost,
                                             [](auto a, double b) { return double(a) < b; });
            return std::size_t(at - before.begin());
        };
        cuts_.push_back(0);
        for (std::size_t i = 1; i < count; ++i) {
            const auto target = share * double(i);
            const auto distance = [&](std::size_t at) {
                return double(before[at]) < target ? target - double(before[at])
                                                   : double(before[at]) - target;
            };
            // Of the two places beside the target the nearer one; then what is better around it.
            auto best = std::min(place(target), order.size());
            if (best > 0 && distance(best - 1) < distance(best)) --best;
            const auto inside = [&](std::size_t at) {
                return at < order.size() && order[at].continues;
            };
            while (best > 0 && inside(best)) --best;
            const auto shared = [&](std::size_t at) {
                return at < order.size() ? order[at].shared : 0;
            };
            const auto first = place(target - share / 8), last = place(target + share / 8);
            for (auto at = first; at <= last && at < order.size(); ++at) {
                if (distance(at) > share / 8 || inside(at)) continue;
                if (shared(at) < shared(best) ||
                    (shared(at) == shared(best) && distance(at) < distance(best)))
                    best = at;
            }
            cuts_.push_back(std::max(best, cuts_.back()));
            if (cuts_.back() > 0 && cuts_.back() < order.size() &&
                cuts_.back() != cuts_[cuts_.size() - 2])
                duplicated_ += order[cuts_.back()].shared;
        }
        if (count > 0) cuts_.push_back(order.size());
        for (std::size_t i = 0; i < count; ++i) {
            costs_.push_back(before[end(i)] - before[begin(i)]);
            if (begin(i) > 0 && begin(i) < end(i)) costs_.back() += order[begin(i)].shared;
        }
    }

    std::size_t count() const { return costs_.size(); }
    std::size_t begin(std::size_t shard) const { return cuts_[shard]; } ///< place in the order
    std::size_t end(std::size_t shard) const { return cuts_[shard + 1]; }
    std::uint64_t cost(std::size_t shard) const { return costs_[shard]; } ///< with what is twice
    std::uint64_t duplicated() const { return duplicated_; } ///< computed once more, for the cuts

private:
    std::vector<std::size_t> cuts_;
    std::vector<std::uint64_t> costs_;
    std::uint64_t duplicated_ = 0;
};

/// Which part of a suite a process runs; counted from 0.
struct ShardChoice {
    std::size_t index = 0, count = 1;
};

/// What --shard says: "I/N", or "auto", or "auto/N" where the environment gives no count; one that
/// it gives must be the same.
/// `get(name)`: the value of a variable, or nothing. Open MPI's ranks go before Slurm's arrays
/// (under mpirun inside a job every rank has the same task), and those before Kubernetes' indexed
/// jobs.
template <class Get>
std::optional<ShardChoice> read_shard(std::string_view text, Get get, std::string& error) {
    const auto number = [](std::string_view digits) -> std::optional<std::size_t> {
        if (digits.empty() || digits.size() > 9) return {};
        std::size_t value = 0;
        for (const char c : digits) {
            if (c < '0' || c > '9') return {};
            value = value * 10 + std::size_t(c - '0');
        }
        return value;
    };
    const auto fail = [&](std::string why) {
        error = std::move(why);
        return std::optional<ShardChoice>();
    };
    const std::string given(text);
    const auto slash = text.find('/');
    const auto word = text.substr(0, slash);
    std::optional<std::size_t> count;
    if (slash != text.npos) {
        count = number(text.substr(slash + 1));
        if (!count || *count == 0)
            return fail("--shard " + given + ": the number of shards must be a number from 1");
    }
    ShardChoice choice;
    if (word != "auto") {
        const auto index = number(word);
        if (!index || !count)
            return fail("--shard " + given +
                        ": give I/N (the I-th of N parts, I from 0), auto or auto/N");
        choice = {*index, *count};
    } else {
        // A variable that is there and is no number is an error, not another scheduler's turn.
        const auto variable = [&](const char* name) -> std::optional<std::size_t> {
            const std::optional<std::string> value = get(name);
            if (!value || value->empty()) return {};
            const auto it = number(*value);
            if (!it && error.empty())
                error = "--shard " + given + ": " + name + " is \"" + *value + "\", no number";
            return it;
        };
        std::optional<std::size_t> index, of;
        const char* counts = "OMPI_COMM_WORLD_SIZE";
        if ((index = variable("OMPI_COMM_WORLD_RANK"))) {
            of = variable(counts);
            // Every task of an array would run the whole.
            if (error.empty() && of == 1u && variable("SLURM_ARRAY_TASK_COUNT").value_or(1) > 1)
                return fail("--shard " + given +
                            ": OMPI_COMM_WORLD_SIZE is 1 and SLURM_ARRAY_TASK_COUNT is more; start "
                            "evalrt without mpirun, or give $SLURM_ARRAY_TASK_ID/N");
            if (error.empty() && of == 1u && variable("JOB_COMPLETION_INDEX").value_or(0) > 0)
                return fail("--shard " + given +
                            ": OMPI_COMM_WORLD_SIZE is 1 and JOB_COMPLETION_INDEX is more than 0; "
                            "start evalrt without mpirun, or give $JOB_COMPLETION_INDEX/N");
        } else if (error.empty() && (index = variable("SLURM_ARRAY_TASK_ID"))) {
            of = variable(counts = "SLURM_ARRAY_TASK_COUNT");
            const auto first = variable("SLURM_ARRAY_TASK_MIN").value_or(0);
            if (error.empty() && first > *index)
                return fail("--shard " + given +
                            ": SLURM_ARRAY_TASK_ID is below SLURM_ARRAY_TASK_MIN");
            // --array=3, to run one part again, would be the whole.
            if (error.empty() && !count && first > 1)
                return fail("--shard " + given + ": the array's tasks begin at " +
                            std::to_string(first) + ", so they may be some of more: give auto/" +
                            std::to_string(of.value_or(1)) +
                            " if they are all, or I/N to run single parts again, such as "
                            "$SLURM_ARRAY_TASK_ID/N");
            *index -= std::min(first, *index);
            const auto step =
                std::max<std::size_t>(variable("SLURM_ARRAY_TASK_STEP").value_or(1), 1);
            const auto last = variable("SLURM_ARRAY_TASK_MAX");
            // A list such as 0,2,7: what part a task is does not show in its own number.
            if (error.empty() && of && last && *last >= first && (count ? *count == *of : true) &&
                (*last - first) / step + 1 != *of)
                return fail("--shard " + given + ": the array's task numbers have gaps (" +
                            std::to_string(*of) + " tasks from " + std::to_string(first) + " to " +
                            std::to_string(*last) +
                            "): number them without, or give I/N, such as "
                            "$SLURM_ARRAY_TASK_ID/N to run single parts again");
            *index /= step;
        } else if (error.empty()) {
            index = variable("JOB_COMPLETION_INDEX");
        }
        if (!error.empty()) return {};
        if (!index)
            return fail("--shard " + given +
                        ": no scheduler has set OMPI_COMM_WORLD_RANK, SLURM_ARRAY_TASK_ID or "
                        "JOB_COMPLETION_INDEX; give I/N");
        if (count && of && *count != *of)
            return fail("--shard " + given + ": " + counts + " is " + std::to_string(*of) +
                        ", not " + std::to_string(*count) +
                        "; auto goes by the scheduler (to run single parts again give I/N)");
        if (!count) count = of;
        if (!count)
            return fail("--shard " + given +
                        ": the scheduler does not say how many shards there are; give auto/N");
        choice = {*index, *count};
    }
    if (choice.count == 0) return fail("--shard " + given + ": there are no shards");
    if (choice.index >= choice.count)
        return fail("--shard " + given + ": there is no part " + std::to_string(choice.index) +
                    " of " + std::to_string(choice.count) + ", they count from 0");
    return choice;
}

} // namespace evalrt::detail

#endif
