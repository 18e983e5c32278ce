// Which experts the tokens of a routing benchmark go to: loads of a given skew, and a choice of experts that has them.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace concerto {

// even: as equal as whole numbers allow. zipf: as 1 / rank. one: every token goes to expert 0 (and, with top_k > 1, its
// other choices are even over the rest).
enum class Skew { kEven, kZipf, kOne };
const char* skew_name(Skew skew);
Skew skew_by_name(std::string_view name);  // Error(kUsage) for an unknown one

// Rows of each expert: tokens * top_k in all, none above `tokens`, since a token chooses an expert once.
// 1 <= top_k <= experts.
std::vector<int64_t> expert_loads(Skew skew, int64_t tokens, int64_t experts, int64_t top_k);

// [tokens, top_k]: different experts for each token, expert e chosen loads[e] times, by tokens spread over the batch by
// `seed`.
std::vector<int32_t> chosen_experts(const std::vector<int64_t>& loads, int64_t tokens, int64_t top_k, uint64_t seed);

}  // namespace concerto
