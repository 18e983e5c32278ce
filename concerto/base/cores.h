// The cores (processors, by Linux's numbers) that threads may run on.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace concerto {

constexpr int kMostCores = 8192;  // that Linux can be built for

// "0-3,8", as Linux writes lists of processors, in the order given. Gives what is wrong with it, or an empty string.
std::string parse_cores(std::string_view text, std::vector<int>& cores);
std::string format_cores(const std::vector<int>& cores);

// The affinity mask of the calling thread; empty if the system does not tell.
std::vector<int> allowed_cores();
bool set_allowed_cores(const std::vector<int>& cores);  // of the calling thread; false if the system refuses
// Error(kConfig) that says which of `cores` this machine does not have, or which this process may not use.
void check_cores(const std::vector<int>& cores);

// How many threads can run at once: the affinity mask, or the quota of processor time of a control group (rounded up) if
// that is less. `root` stands before /proc and /sys: tests make up their own.
int usable_cores(const std::string& root = "");

}  // namespace concerto
