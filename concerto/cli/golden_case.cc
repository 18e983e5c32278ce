#include "concerto/cli/golden_case.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <regex>
#include <sstream>

#include "concerto/base/json.h"

namespace concerto {
namespace {

// The categories of tests/golden/make_golden.py, which name the tolerances of case.json.
const std::vector<std::pair<const char*, const char*>> kCategories = {
    {"hidden", R"((hidden|attn_out|mlp_out|vision|resampler)\..*|final_norm)"},
    {"router", R"(router\..*\.(logits|probs|scores|combine|topk_weight))"},
    {"logits", R"(logits|generate\.logits)"},
    {"loss", R"((float64\.)?(loss|aux_loss|total_loss|mtp_loss\..*))"},
    {"grad", R"(grad\..*|(float64\.)?grad_norm)"},
    {"train", R"((float64\.)?train\.(loss|ce|aux_loss|grad_norm))"},
    {"final", R"(final\..*)"},
    {"final_delta_l2", R"(final_delta_l2\..*)"},
};

nlohmann::json read_case(const std::string& path) {
  std::ifstream in(path);
  if (!in)
    throw Error(ErrorCode::kModel, path, "cannot be opened", "A golden folder holds golden.safetensors and case.json.");
  std::stringstream text;
  text << in.rdbuf();
  return parse_json(text.str(), ErrorCode::kModel, path);
}

// The kernels trust ids and positions: what a file says of them is looked at here.
void check_range(const std::string& name, const std::vector<int64_t>& values, int64_t low, int64_t end,
                 int64_t also = 0) {
  for (size_t i = 0; i < values.size(); ++i)
    if ((values[i] < low || values[i] >= end) && values[i] != also)
      throw Error(ErrorCode::kModel, name,
                  fmt::format("value {} is {}, {} <= x < {} is wanted", i, values[i], low, end),
                  "Use the model that the case was made with.");
}

// Depth m reads the token at t + 1 + m and predicts that at t + 2 + m (reference 5.4), inside the document.
void add_mtp_arrays(MicroBatch& m, const ModelConfig& config) {
  const int64_t tokens = m.tokens();
  for (int64_t depth = 0; depth < config.num_nextn_predict_layers; ++depth)
    for (size_t doc = 0; doc + 1 < m.doc_offsets.size(); ++doc)
      for (int64_t t = m.doc_offsets[doc]; t < m.doc_offsets[doc + 1]; ++t) {
        const int64_t next = t + 1 + depth;
        const bool inside = next < m.doc_offsets[doc + 1];
        m.mtp_token_ids.push_back(inside ? m.token_ids[static_cast<size_t>(next)]
                                         : static_cast<int32_t>(std::max<int64_t>(0, config.pad_token_id)));
        m.mtp_targets.push_back(inside ? m.targets[static_cast<size_t>(next)] : kIgnoreIndex);
      }
  CHECK(static_cast<int64_t>(m.mtp_targets.size()) == config.num_nextn_predict_layers * tokens);
}

}  // namespace

bool GoldenReport::ok() const {
  return unused.empty() && !lines.empty() &&
         std::all_of(lines.begin(), lines.end(), [](const GoldenLine& l) { return l.ok(); });
}

GoldenCase::GoldenCase(const std::string& dir) : file_(dir + "/golden.safetensors") {
  const std::string path = dir + "/case.json";
  try {
    const nlohmann::json c = read_case(path);
    for (const auto& [name, t] : c.at("tolerance").items()) tolerance_[name] = {t.at("max"), t.at("l2")};
    aux_in_loss_ = c.at("aux_loss_in_loss");
    if (c.contains("train")) {
      const nlohmann::json& t = c.at("train");
      steps_ = t.at("steps");
      const std::string name = t.value("optimizer", "adamw");
      if (name != "adamw" && name != "lamb")
        throw Error(ErrorCode::kModel, path, fmt::format("train.optimizer is {}", json_quote(name)),
                    "Accepted: adamw, lamb");
      optimizer_.name = name == "lamb" ? OptimizerName::kLamb : OptimizerName::kAdamW;
      optimizer_.lr = t.at("lr");
      optimizer_.schedule = LrSchedule::kConstant;
      optimizer_.beta1 = t.at("betas").at(0);
      optimizer_.beta2 = t.at("betas").at(1);
      optimizer_.eps = t.at("eps");
      optimizer_.weight_decay = t.at("weight_decay");
      optimizer_.decay = t.at("decay") == "all" ? Decay::kAll : Decay::kMatrices;
      optimizer_.clip_norm = t.at("clip_norm");
    }
  } catch (const nlohmann::json::exception& e) {
    throw Error(ErrorCode::kModel, path, json_fault(e.what()), "Make the case again, or copy it again.");
  }
}

OptimizerSection GoldenCase::optimizer() const { return optimizer_; }
int64_t GoldenCase::train_steps() const { return has("train.input_ids") ? steps_ : 0; }
bool GoldenCase::aux_loss_in_loss() const { return aux_in_loss_; }

std::vector<double> GoldenCase::values(const std::string& name) const {
  const SafetensorsEntry& e = file_.require(name);
  std::vector<double> out(static_cast<size_t>(e.shape.elements()));
  if (e.dtype == DType::kF32 || e.dtype == DType::kF64 || e.dtype == DType::kBF16 || e.dtype == DType::kF16) {
    copy_tensor(e, View(out.data(), {e.shape.elements()}, DType::kF64));
    return out;
  }
  for (int64_t i = 0; i < e.shape.elements(); ++i) {
    int64_t v = 0;
    if (e.dtype == DType::kU8)
      v = static_cast<int64_t>(e.data[i]);
    else if (e.dtype == DType::kI64)
      std::memcpy(&v, e.data + i * 8, 8);
    else
      throw Error(ErrorCode::kModel, name, fmt::format("is {}, which no golden tensor is", dtype_name(e.dtype)));
    out[static_cast<size_t>(i)] = static_cast<double>(v);
  }
  return out;
}

std::vector<std::string> GoldenCase::names(const std::string& prefix) const {
  std::vector<std::string> out;
  for (const SafetensorsEntry& e : file_.entries())
    if (e.name.starts_with(prefix)) out.push_back(e.name);
  std::sort(out.begin(), out.end());
  return out;
}

void GoldenCase::fed(const std::string& name) {
  if (used_.insert(name).second) report_.fed.push_back(name);
}

// `count` integers of the tensor: of step `step`, if there is one array a step.
std::vector<int64_t> GoldenCase::slice(const std::string& name, int64_t step, int64_t count) {
  const std::vector<double> all = values(name);
  const int64_t n = static_cast<int64_t>(all.size()), at = n == count ? 0 : step * count;
  if (at + count > n)
    throw Error(ErrorCode::kModel, name, fmt::format("holds {} values, wanted {} for step {}", n, count, step));
  fed(name);
  std::vector<int64_t> out;
  for (int64_t i = at; i < at + count; ++i) out.push_back(static_cast<int64_t>(all[static_cast<size_t>(i)]));
  return out;
}

// [tokens, S] 1 where the documents of the micro-batches let a token see position j of its row.
static std::vector<double> attention_mask(const GoldenBatch& batch, int64_t cols) {
  std::vector<double> allowed(batch.rows.size() * static_cast<size_t>(cols), 0.0);
  size_t first = 0;  // token of the batch that a micro-batch begins with
  for (const MicroBatch& m : batch.micro_batches) {
    for (size_t d = 0; d + 1 < m.doc_offsets.size(); ++d)
      for (int32_t i = m.doc_offsets[d]; i < m.doc_offsets[d + 1]; ++i)
        for (int32_t j = m.doc_offsets[d]; j <= i; ++j) {
          const size_t token = first + static_cast<size_t>(i);
          const int64_t seen = batch.rows[first + static_cast<size_t>(j)];
          if (seen / cols == batch.rows[token] / cols)
            allowed[token * static_cast<size_t>(cols) + static_cast<size_t>(seen % cols)] = 1;
        }
    first += static_cast<size_t>(m.tokens());
  }
  return allowed;
}

GoldenBatch GoldenCase::batch(const std::string& p, int64_t step, int64_t micro_batches, const ModelConfig& config) {
  const Shape ids_shape = shape(p + "input_ids");
  if (ids_shape.rank() < 2 || ids_shape.elements() == 0)
    throw Error(ErrorCode::kModel, p + "input_ids",
                fmt::format("has shape {}, [rows, tokens] is wanted", ids_shape.str()));
  const bool stacked = ids_shape.rank() == 3;
  const int64_t rows = ids_shape[stacked ? 1 : 0], cols = ids_shape[stacked ? 2 : 1], n = rows * cols;
  const auto ids = slice(p + "input_ids", step, n), labels = slice(p + "labels", step, n);
  const auto optional = [&](const char* name, int64_t fallback) {
    return has(p + name) ? slice(p + name, step, n) : std::vector<int64_t>(static_cast<size_t>(n), fallback);
  };
  const auto mask = optional("attention_mask", 1), docs = optional("doc_ids", 0), given = optional("position_ids", -1);
  const bool has_positions = has(p + "position_ids");
  check_range(p + "input_ids", ids, 0, config.vocab_size);
  check_range(p + "labels", labels, 0, config.vocab_size, kIgnoreIndex);
  if (has_positions) check_range(p + "position_ids", given, 0, cols);
  std::vector<int64_t> targets;  // the label of the next token in the row
  for (int64_t i = 0; i < n; ++i) targets.push_back((i + 1) % cols ? labels[static_cast<size_t>(i + 1)] : kIgnoreIndex);
  if (has(p + "target_ids")) {
    compare_values(p + "target_ids", std::vector<double>(targets.begin(), targets.end()), values(p + "target_ids"));
  }

  GoldenBatch out;
  const int64_t per = (rows + micro_batches - 1) / micro_batches;
  for (int64_t b = 0; b < rows; ++b) {
    if (b % per == 0) {
      out.micro_batches.emplace_back();
      out.micro_batches.back().doc_offsets = {0};
      out.micro_batches.back().row_offsets = {0};
    }
    MicroBatch& m = out.micro_batches.back();
    int32_t position = 0;
    for (int64_t s = 0; s < cols; ++s) {
      const auto i = static_cast<size_t>(b * cols + s);
      if (mask[i] == 0) continue;
      if (s > 0 && docs[i] != docs[i - 1]) {
        m.doc_offsets.push_back(static_cast<int32_t>(m.tokens()));
        position = 0;
      }
      m.token_ids.push_back(static_cast<int32_t>(ids[i]));
      m.targets.push_back(static_cast<int32_t>(targets[i]));
      m.positions.push_back(has_positions ? static_cast<int32_t>(given[i]) : position);
      ++position;
      out.rows.push_back(static_cast<int64_t>(i));
    }
    m.doc_offsets.push_back(static_cast<int32_t>(m.tokens()));
    m.row_offsets.push_back(static_cast<int32_t>(m.tokens()));
  }
  for (MicroBatch& m : out.micro_batches) add_mtp_arrays(m, config);
  if (has(p + "attn_allowed")) compare(p + "attn_allowed", attention_mask(out, cols), out.rows);
  return out;
}

std::pair<double, double> GoldenCase::tolerance(const std::string& name) const {
  for (const auto& [category, pattern] : kCategories) {
    if (!std::regex_match(name, std::regex(pattern))) continue;
    const auto it = tolerance_.find(category);
    if (it == tolerance_.end())
      throw Error(ErrorCode::kModel, "case.json", fmt::format("no tolerance '{}' for {}", category, name));
    return it->second;
  }
  return {0, 0};  // integers and choices: exact
}

void GoldenCase::compare(const std::string& name, const std::vector<double>& got, const std::vector<int64_t>& rows) {
  std::vector<double> want = values(name);
  if (!rows.empty()) {
    const Shape s = shape(name);
    const int64_t cols = s[s.rank() - 1];
    std::vector<double> picked;
    for (int64_t r : rows) {
      if ((r + 1) * cols > static_cast<int64_t>(want.size()))
        throw Error(ErrorCode::kModel, name, "has too few rows for the batch");
      picked.insert(picked.end(), want.begin() + r * cols, want.begin() + (r + 1) * cols);
    }
    want = std::move(picked);
  }
  compare_values(name, got, std::move(want));
}

void GoldenCase::compare_values(const std::string& name, const std::vector<double>& got, std::vector<double> want) {
  const bool again = !used_.insert(name).second;
  if (got.size() != want.size())
    throw Error(ErrorCode::kModel, name,
                fmt::format("the file holds {} values, this model makes {}", want.size(), got.size()));
  GoldenLine line{.name = name};
  double top = 0, norm = 0, max = 0, l2 = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    const double d = std::abs(got[i] - want[i]);
    max = std::isnan(d) ? d : std::max(max, d);
    l2 += d * d;
    top = std::max(top, std::abs(want[i]));
    norm += want[i] * want[i];
  }
  line.max = max / (top > 0 ? top : 1);
  line.l2 = std::sqrt(l2) / (norm > 0 ? std::sqrt(norm) : 1);
  std::tie(line.tolerance_max, line.tolerance_l2) = tolerance(name);
  if (!again) {
    report_.lines.push_back(line);
    return;
  }
  for (GoldenLine& l : report_.lines)  // compared once more (another step): keep the worse
    if (l.name == name && !(line.max <= l.max)) l = line;
}

GoldenReport GoldenCase::finish() {
  for (const SafetensorsEntry& e : file_.entries()) {
    ++report_.total;
    if (!used_.count(e.name)) report_.unused.push_back(e.name);
  }
  return report_;
}

}  // namespace concerto
