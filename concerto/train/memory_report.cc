#include "concerto/train/memory_report.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <span>
#include <string_view>

#include "concerto/base/error.h"
#include "concerto/train/human_units.h"

namespace concerto {
namespace {

// The number after `name` in lines as "VmRSS:	    1234 kB".
int64_t kilobytes(std::string_view status, std::string_view name) {
  const size_t at = status.find(name);
  if (at == std::string_view::npos) return 0;
  status.remove_prefix(at + name.size());
  status.remove_prefix(std::min(status.find_first_not_of(" \t"), status.size()));
  int64_t value = 0;
  std::from_chars(status.data(), status.data() + status.size(), value);
  return value * 1024;
}

// The file's beginning, in `text`.
std::string_view read_file(const char* path, std::span<char> text) {
  size_t size = 0;
  const int fd = ::open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return {};
  for (ssize_t n; size < text.size() && (n = ::read(fd, text.data() + size, text.size() - size)) > 0;)
    size += static_cast<size_t>(n);
  ::close(fd);
  return {text.data(), size};
}

}  // namespace

int64_t read_available_memory() {
  char text[8192];
  const std::string_view info = read_file("/proc/meminfo", text);
  return kilobytes(info, "\nMemAvailable:") + kilobytes(info, "\nSwapFree:");
}

void check_memory(int64_t wanted, int64_t available) {
  if (available <= 0 || wanted <= available) return;
  throw Error(ErrorCode::kMemory, "memory",
              fmt::format("the run would take {}, {} are free", format_bytes(wanted), format_bytes(available)),
              "Use a smaller training.micro_batch_size or seq_length, parallel.recompute: full, or a smaller model.");
}

ProcessMemory read_process_memory() {
  char text[8192];
  const std::string_view status = read_file("/proc/self/status", text);
  return {.rss_bytes = kilobytes(status, "\nVmRSS:"),
          .peak_bytes = kilobytes(status, "\nVmHWM:"),
          .anonymous_bytes = kilobytes(status, "\nRssAnon:")};
}

double MemoryReport::error() const {
  if (predicted_bytes <= 0) return 0;
  return static_cast<double>(peak_bytes) / static_cast<double>(predicted_peak_bytes()) - 1;
}

std::string format_memory_report(const MemoryReport& r) {
  const std::string real = "real " + format_bytes(r.peak_bytes);
  if (r.predicted_bytes <= 0) return real;
  return fmt::format("predicted {} ({} process + {} run), {} ({:+.1f} %)", format_bytes(r.predicted_peak_bytes()),
                     format_bytes(r.baseline_bytes), format_bytes(r.predicted_bytes), real, 100 * r.error());
}

}  // namespace concerto
