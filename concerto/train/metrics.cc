#include "concerto/train/metrics.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>

#include "concerto/base/error.h"
#include "concerto/base/files.h"

namespace concerto {
namespace {

void put(fmt::memory_buffer& out, std::string_view text) { out.append(text.data(), text.data() + text.size()); }

void put(fmt::memory_buffer& out, double value) {
  if (!std::isfinite(value)) return put(out, "null");
  char digits[32];
  const auto end = std::to_chars(digits, digits + sizeof(digits), value, std::chars_format::general, 17).ptr;
  out.append(digits, end);
}

void put(fmt::memory_buffer& out, int64_t value) { fmt::format_to(std::back_inserter(out), "{}", value); }

struct Pair {
  double low, high;
};
void put(fmt::memory_buffer& out, Pair pair) {
  put(out, "[");
  put(out, pair.low);
  put(out, ", ");
  put(out, pair.high);
  put(out, "]");
}

template <class T>
void field(fmt::memory_buffer& out, std::string_view name, T value) {
  put(out, out.size() == 0 ? "{\"" : ", \"");
  put(out, name);
  put(out, "\": ");
  put(out, value);
}

// {"3": number, ...} of every MoE layer.
template <class Number>
void by_layer(fmt::memory_buffer& out, std::string_view name, const StepReport& r, Number number) {
  field(out, name, std::string_view());
  for (size_t i = 0; i < r.moe_layers.size(); ++i) {
    put(out, i == 0 ? "{\"" : ", \"");
    put(out, r.moe_layers[i]);
    put(out, "\": ");
    put(out, number(r.layer_loads[i]));
  }
  put(out, "}");
}

// The lines of a metrics file that belong to steps up to `last_step`, whole and in order.
std::string rows_up_to(const std::string& path, int64_t last_step, int64_t& broken) {
  std::ifstream in(path, std::ios::binary);
  if (!in) throw Error(ErrorCode::kIo, path, "cannot be read", "Check its rights.");
  std::string kept, line;
  while (std::getline(in, line)) {
    if (line.empty()) continue;
    const auto row = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
    const bool whole = row.is_object() && row.contains("step") && row["step"].is_number_integer();
    if (!whole) {
      broken += in.eof() ? 0 : 1;  // a torn last line is what a crash leaves; anything else is worth a word
    } else if (row["step"].get<int64_t>() <= last_step) {
      kept.append(line).push_back('\n');
    }
  }
  if (in.bad()) throw Error(ErrorCode::kIo, path, "cannot be read to its end", "Check the disk.");
  return kept;
}

// Cuts the file and returns its path, so that it happens before the file is opened for appending.
const std::string& cut_after(const std::string& path, int64_t resume_step, const Warn& warn) {
  if (!std::filesystem::exists(path)) return path;
  std::string kept;
  int64_t broken = 0;
  if (resume_step > 0) kept = rows_up_to(path, resume_step, broken);
  write_file_atomic(path, kept);
  if (broken > 0 && warn) warn(fmt::format("{}: removed {} broken line{}", path, broken, broken == 1 ? "" : "s"));
  return path;
}

}  // namespace

void summarize_loads(StepReport& r) {
  const size_t layers = r.moe_layers.size();
  CHECK(layers == r.tokens_per_expert.size(), "{} layers, {} counts", layers, r.tokens_per_expert.size());
  CHECK(r.dropped_per_expert.empty() || layers == r.dropped_per_expert.size());
  CHECK(r.correction_bias.empty() || layers == r.correction_bias.size());
  r.layer_loads.resize(layers);
  r.expert_max_over_mean = 1;
  r.expert_idle_share = 0;
  for (size_t i = 0; i < layers; ++i) {
    r.layer_loads[i] = summarize_load(
        r.tokens_per_expert[i],
        r.dropped_per_expert.empty() ? std::span<const int64_t>() : std::span<const int64_t>(r.dropped_per_expert[i]),
        r.correction_bias.empty() ? std::span<const double>() : std::span<const double>(r.correction_bias[i]));
    r.expert_max_over_mean = std::max(r.expert_max_over_mean, r.layer_loads[i].max_over_mean);
    r.expert_idle_share += r.layer_loads[i].idle_share / static_cast<double>(layers);
  }
}

MetricsWriter::MetricsWriter(const std::string& path, int64_t resume_step, Warn warn)
    : file_(cut_after(path, resume_step, warn), warn) {}

void MetricsWriter::write(const StepReport& r) {
  CHECK(r.moe_layers.size() == r.layer_loads.size(), "{} layers, {} loads", r.moe_layers.size(), r.layer_loads.size());
  row_.reserve(1024 + 64 * r.mtp_losses.size() +
               320 * r.moe_layers.size());  // the longest row: later ones never grow it
  row_.clear();
  field(row_, "step", r.step);
  field(row_, "loss", r.loss);
  field(row_, "total_loss", r.total_loss);
  field(row_, "lr", r.lr);
  field(row_, "grad_norm", r.grad_norm);
  field(row_, "tokens", r.tokens);
  field(row_, "tokens_per_s", r.tokens_per_s);
  field(row_, "expert_max_over_mean", r.expert_max_over_mean);
  field(row_, "aux_loss", r.aux_loss);
  if (r.z_loss != 0) field(row_, "z_loss", r.z_loss);
  if (r.orthogonal_loss != 0) field(row_, "orthogonal_loss", r.orthogonal_loss);
  if (!r.mtp_losses.empty()) {
    put(row_, ", \"mtp_losses\": ");
    for (size_t i = 0; i < r.mtp_losses.size(); ++i) {
      put(row_, i == 0 ? "[" : ", ");
      put(row_, r.mtp_losses[i]);
    }
    put(row_, "]");
  }
  if (!r.moe_layers.empty()) {
    field(row_, "expert_idle_share", r.expert_idle_share);
    by_layer(row_, "expert_load", r, [](const LayerLoad& l) { return l.max_over_mean; });
    by_layer(row_, "expert_idle", r, [](const LayerLoad& l) { return l.idle_share; });
    by_layer(row_, "expert_entropy", r, [](const LayerLoad& l) { return l.entropy; });
    if (r.layer_loads[0].has_drops)
      by_layer(row_, "expert_dropped", r, [](const LayerLoad& l) { return l.dropped_share(); });
    if (r.layer_loads[0].has_bias)
      by_layer(row_, "expert_bias", r, [](const LayerLoad& l) { return Pair{l.bias_min, l.bias_max}; });
  }
  field(row_, "seconds", r.seconds);
  if (r.peak_bytes > 0) field(row_, "peak_bytes", r.peak_bytes);
  if (r.skipped) field(row_, "skipped", "true");
  put(row_, "}\n");
  file_.append({row_.data(), row_.size()});
}

void MetricsWriter::write(const EvalReport& r) {
  row_.clear();
  field(row_, "step", r.step);
  field(row_, "valid_loss", r.valid_loss);
  field(row_, "valid_tokens", r.valid_tokens);
  field(row_, "seconds", r.seconds);
  put(row_, "}\n");
  file_.append({row_.data(), row_.size()});
}

}  // namespace concerto
