#include "concerto/base/control_groups.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>

namespace concerto {

std::string_view read_kernel_file(const char* path, std::span<char> text) {
  size_t size = 0;
  const int fd = ::open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return {};
  for (ssize_t n; size < text.size() && (n = ::read(fd, text.data() + size, text.size() - size)) > 0;)
    size += static_cast<size_t>(n);
  ::close(fd);
  return {text.data(), size};
}

// Inside a container the path may be the host's, which is not mounted: the walk up ends at the container's own group,
// the top of what is.
void for_each_control_group(const std::string& root, std::string_view controller,
                            const std::function<void(const std::string& dir, bool version1)>& f) {
  char text[8192];
  std::string_view lines = read_kernel_file((root + "/proc/self/cgroup").c_str(), text);
  while (!lines.empty()) {  // "4:memory:/path", in version 2 "0::/path"
    const std::string_view line = lines.substr(0, lines.find('\n'));
    lines.remove_prefix(std::min(lines.size(), line.size() + 1));
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string_view::npos || second == std::string_view::npos) continue;
    const std::string names = fmt::format(",{},", line.substr(first + 1, second - first - 1));
    const bool version1 = names.find(fmt::format(",{},", controller)) != std::string::npos;
    if (!version1 && names != ",,") continue;
    std::string path(line.substr(second + 1));
    if (path.find("/..") != std::string::npos) path.clear();  // outside of what this process can see
    for (;;) {
      while (path.ends_with('/')) path.pop_back();
      f(fmt::format("{}/sys/fs/cgroup{}{}/", root, version1 ? fmt::format("/{}", controller) : "", path), version1);
      if (path.empty()) break;
      path.resize(path.rfind('/'));
    }
  }
}

}  // namespace concerto
