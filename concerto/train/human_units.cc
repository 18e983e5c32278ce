#include "concerto/train/human_units.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstring>

namespace concerto {
namespace {

// Three significant digits, as 1.23, 12.3, 123.
std::string three_digits(double value) {
  const double size = std::abs(value);
  return fmt::format("{:.{}f}", value, size < 9.995 ? 2 : size < 99.95 ? 1 : 0);
}

}  // namespace

std::string format_count(double value) {
  const double size = std::abs(value);
  if (!std::isfinite(value)) return fmt::format("{}", value);
  if (size < 999.5)
    return size == std::floor(size) || size >= 99.95 ? fmt::format("{:.0f}", value) : three_digits(value);
  if (size < 999.5e3) return three_digits(value / 1e3) + "k";
  if (size < 999.5e6) return three_digits(value / 1e6) + "M";
  if (size < 999.5e9) return three_digits(value / 1e9) + "B";
  return three_digits(value / 1e12) + "T";
}

std::string format_duration(double seconds) {
  if (!std::isfinite(seconds) || seconds < 0) return "?";
  if (seconds < 9.95) return fmt::format("{:.1f} s", seconds);
  if (seconds < 59.5) return fmt::format("{:.0f} s", seconds);
  if (seconds >= 1e12) return "?";
  const int64_t s = std::llround(seconds);
  if (s < 3600) return fmt::format("{}m{:02}s", s / 60, s % 60);
  if (s < 86400) return fmt::format("{}h{:02}m", s / 3600, s % 3600 / 60);
  return fmt::format("{}d{:02}h", s / 86400, s % 86400 / 3600);
}

std::string format_bytes(int64_t bytes) {
  const double value = static_cast<double>(bytes), size = std::abs(value);
  if (size < 1024) return fmt::format("{} B", bytes);
  if (size < 0x1p20) return three_digits(value * 0x1p-10) + " KiB";
  if (size < 0x1p30) return three_digits(value * 0x1p-20) + " MiB";
  if (size < 0x1p40) return three_digits(value * 0x1p-30) + " GiB";
  return three_digits(value * 0x1p-40) + " TiB";
}

std::string format_loss(double value) { return fmt::format("{:.4f}", value); }

std::string shell_word(const std::string& path) {
  const auto plain = [](char c) {
    const auto u = static_cast<unsigned char>(c);
    return u >= 0x80 || std::isalnum(u) != 0 || std::strchr("_@%+=:,./-", c) != nullptr;
  };
  if (!path.empty() && std::all_of(path.begin(), path.end(), plain)) return path;
  std::string word = "'";
  for (const char c : path) word += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return word + "'";
}

std::string group_digits(int64_t value) {
  const std::string text = fmt::format("{}", value);
  std::string grouped;
  for (size_t i = 0; i < text.size(); ++i) {
    const size_t left = text.size() - i;
    if (left % 3 == 0 && i > 0 && text[i - 1] != '-') grouped.push_back(',');
    grouped.push_back(text[i]);
  }
  return grouped;
}

int64_t display_width(const std::string& text) {
  int64_t width = 0;
  for (const char c : text) width += (static_cast<unsigned char>(c) & 0xc0) != 0x80;
  return width;
}

}  // namespace concerto
