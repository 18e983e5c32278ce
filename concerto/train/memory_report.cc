#include "concerto/train/memory_report.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <charconv>
#include <string_view>

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

}  // namespace

ProcessMemory read_process_memory() {
  char text[8192];
  size_t size = 0;
  const int fd = ::open("/proc/self/status", O_RDONLY | O_CLOEXEC);
  if (fd < 0) return {};
  for (ssize_t n; size < sizeof(text) && (n = ::read(fd, text + size, sizeof(text) - size)) > 0;)
    size += static_cast<size_t>(n);
  ::close(fd);
  const std::string_view status(text, size);
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
