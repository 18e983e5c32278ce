// Numbers and paths as people read them, in progress lines, summaries and pictures.
#pragma once

#include <cstdint>
#include <string>

namespace concerto {

std::string format_count(double value);       // 987, 12.3k, 4.56M, 1.2B
std::string format_duration(double seconds);  // 0.8 s, 42 s, 3m07s, 2h05m, 3d04h
std::string format_bytes(int64_t bytes);      // 512 B, 12.3 MiB, 1.50 GiB
std::string format_loss(double value);        // 3.1416; nan, inf as such
std::string group_digits(int64_t value);      // 12,345

// A path as a shell reads it back, for a command to copy: in single quotes where it holds more than plain characters.
std::string shell_word(const std::string& path);

// Columns that UTF-8 text takes when each code point takes one.
int64_t display_width(const std::string& text);

}  // namespace concerto
