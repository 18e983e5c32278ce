#include "concerto/config/tp_plan.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

namespace concerto {
namespace {

// What a word does to a linear module, and what we do to each module.
enum class Split { kColumn /* outputs */, kRow /* inputs */, kWhole /* a copy on each rank */, kExperts };

struct Word {
  const char* name;
  Split split;
};
constexpr Word kWords[] = {
    {"colwise", Split::kColumn},
    {"colwise_rep", Split::kColumn},  // and gathers what comes out
    {"colwise_gather_output", Split::kColumn},
    {"local_colwise", Split::kColumn},
    {"packed_colwise", Split::kColumn},
    {"local_packed_colwise", Split::kColumn},
    {"rowwise", Split::kRow},
    {"rowwise_rep", Split::kRow},  // and cuts what goes in
    {"rowwise_split_input", Split::kRow},
    {"local_rowwise", Split::kRow},
    {"packed_rowwise", Split::kRow},
    {"local_packed_rowwise", Split::kRow},
    {"embedding_rowwise", Split::kRow},
    {"replicate", Split::kWhole},
    {"replicated_with_grad_allreduce", Split::kWhole},
    {"sequence_parallel", Split::kWhole},
    {"local", Split::kExperts},
    {"gather", Split::kExperts},
    {"moe_tp_experts", Split::kExperts},
};
constexpr Word kModules[] = {
    {"q_proj", Split::kColumn},
    {"k_proj", Split::kColumn},
    {"v_proj", Split::kColumn},
    {"o_proj", Split::kRow},
    {"gate_proj", Split::kColumn},
    {"up_proj", Split::kColumn},
    {"gate_up_proj", Split::kColumn},
    {"down_proj", Split::kRow},
    {"lm_head", Split::kColumn},
    {"embed_tokens", Split::kRow},
    {"input_layernorm", Split::kWhole},
    {"post_attention_layernorm", Split::kWhole},
    {"norm", Split::kWhole},
    {"gate", Split::kWhole},
    {"mlp", Split::kExperts},
    {"experts", Split::kExperts},
};

template <size_t N>
const Word* find(const Word (&list)[N], const std::string& name) {
  const auto it = std::find_if(std::begin(list), std::end(list), [&](const Word& w) { return name == w.name; });
  return it == std::end(list) ? nullptr : it;
}
template <size_t N>
std::vector<std::string> names(const Word (&list)[N]) {
  std::vector<std::string> all;
  for (const Word& w : list) all.emplace_back(w.name);
  return all;
}

std::vector<std::string> components(const std::string& path) {
  std::vector<std::string> parts(1);
  for (const char c : path)
    if (c == '.')
      parts.emplace_back();
    else
      parts.back() += c;
  return parts;
}

// "layers.*.mlp.experts.down_proj.weight" -> down_proj. `packed`: of all experts in one tensor [experts, in, out] or
// [experts, out, in], where a word may mean either side.
std::string module_of(const std::string& path, bool& packed) {
  std::vector<std::string> parts = components(path);
  while (!parts.empty() && (parts.back() == "weight" || parts.back() == "bias" || parts.back() == "*"))
    parts.pop_back();
  packed = parts.size() > 1 && parts[parts.size() - 2] == "experts";
  return parts.empty() ? "" : parts.back();
}

const char* said(Split split) {
  switch (split) {
    case Split::kColumn:
      return "cut by its outputs (colwise)";
    case Split::kRow:
      return "cut by its inputs (rowwise)";
    case Split::kWhole:
      return "whole on each rank (replicate)";
    case Split::kExperts:
      return "spread by whole experts or cut inside them, as parallel.ep and parallel.etp say (local)";
  }
  return "";
}

bool agrees(Split ours, Split theirs, bool packed) {
  if (theirs == Split::kWhole || ours == theirs) return true;
  return packed && ours != Split::kWhole && theirs != Split::kExperts;
}

}  // namespace

std::vector<std::string> tp_plan_words() { return names(kWords); }

TpPlanReading read_tp_plan(const Value& plan) {
  TpPlanReading reading;
  const auto problem = [&](std::string what, std::string fix) {
    reading.problems.push_back({std::move(what), std::move(fix)});
  };
  if (plan.is_null()) return reading;
  if (plan.kind != Value::Kind::kMap) {
    problem(fmt::format("expected a map of modules to words, got {}", describe(plan)),
            "Remove it: parallel.tp says how many");
    return reading;
  }
  for (const ValueEntry& entry : plan.entries) {
    bool packed = false;
    const std::string name = module_of(entry.key, packed);
    const Word* const module = find(kModules, name);
    const Word* const word = entry.value.is_scalar() ? find(kWords, entry.value.text) : nullptr;
    if (!module)
      problem(fmt::format("{}: no module of this model", entry.key),
              fmt::format("Known: {}", fmt::join(names(kModules), ", ")));
    if (!word)
      problem(fmt::format("{}: {} is no word of such a plan", entry.key, describe(entry.value)),
              fmt::format("Known: {}", fmt::join(tp_plan_words(), ", ")));
    if (module && word && !agrees(module->split, word->split, packed))
      problem(fmt::format("{}: {}, but here it is {}", entry.key, word->name, said(module->split)),
              "Remove the entry: the splits are fixed");
  }
  if (!plan.entries.empty() && reading.problems.empty())
    reading.note =
        "read; it decides nothing. parallel.tp cuts the same modules the same way, and what the plan repeats on each "
        "rank "
        "(*_rep, modules it leaves out) is split here too, with the same numbers";
  return reading;
}

}  // namespace concerto
