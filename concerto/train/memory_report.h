// The memory of this process as the kernel counts it, and how it compares with what was predicted.
#pragma once

#include <cstdint>
#include <string>

namespace concerto {

struct ProcessMemory {
  int64_t rss_bytes = 0;        // resident now (VmRSS): own pages and those of mapped files
  int64_t peak_bytes = 0;       // highest resident so far (VmHWM)
  int64_t anonymous_bytes = 0;  // of rss_bytes, what no file backs (RssAnon)
};

// From /proc/self/status; zeros where that does not exist. Allocates nothing, takes some ten microseconds.
ProcessMemory read_process_memory();

// What this process can still get: the least of what the machine can give (MemAvailable and SwapFree of /proc/meminfo)
// and of what is left below the limits of its control group and of those above it (version 1 or 2; pages of files that
// can be dropped count as free). 0 where none is known. `root`: for tests, a folder with proc/ and sys/.
int64_t read_available_memory(const std::string& root = "");

// Error(kMemory) where `wanted` bytes are more than `available`, if that is known: better said before the first step
// than by the kernel, which kills without a word.
void check_memory(int64_t wanted, int64_t available);

struct MemoryReport {
  int64_t baseline_bytes = 0;   // resident before the run's buffers were made
  int64_t predicted_bytes = 0;  // what the run was predicted to add to it at its peak
  int64_t peak_bytes = 0;       // highest resident, the baseline included

  int64_t predicted_peak_bytes() const { return baseline_bytes + predicted_bytes; }
  double error() const;  // real over predicted peak, minus one; 0 where nothing was predicted
};

// "predicted 512 MiB (38.2 MiB process + 474 MiB run), real 520 MiB (+1.6 %)"
std::string format_memory_report(const MemoryReport& report);

}  // namespace concerto
