#include "concerto/cli/data_command.h"

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <bit>
#include <chrono>
#include <cstdio>
#include <iostream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>

#include "concerto/base/error.h"
#include "concerto/base/json.h"
#include "concerto/base/thread_pool.h"
#include "concerto/cli/option_checks.h"
#include "concerto/data/indexed_dataset.h"
#include "concerto/data/pack.h"
#include "concerto/data/tokenizer.h"

namespace concerto {
namespace {

using nlohmann::ordered_json;

struct Options {
  TokenizerTraining training;
  PackOptions pack;
  std::string tokenizer, output, prefix, split = "file";
  std::vector<int32_t> ids;
  std::string text;
  int64_t show = 3;
  bool json = false, keep_special = false;
};

int processors() { return ThreadPool().size(); }

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

std::string megabytes(int64_t bytes) { return fmt::format("{:.1f} MB", static_cast<double>(bytes) / 1e6); }

void train(Options& options) {
  const auto start = std::chrono::steady_clock::now();
  std::fputs("training a tokenizer ...\n", stderr);
  const Tokenizer tokenizer = train_tokenizer(options.training);
  tokenizer.save(options.output);
  if (options.json) {
    fmt::print("{}\n", ordered_json{{"output", options.output},
                                    {"vocab_size", tokenizer.vocab_size()},
                                    {"seconds", seconds_since(start)}}
                           .dump());
    return;
  }
  fmt::print("{}: a tokenizer of {} tokens (bos {}, eos {}, pad {}), trained in {:.1f} s\n", options.output,
             tokenizer.vocab_size(), tokenizer.bos_id(), tokenizer.eos_id(), tokenizer.pad_id(), seconds_since(start));
}

void encode(const Options& options) {
  const Tokenizer tokenizer = Tokenizer::load(options.tokenizer);
  const auto print = [&](const std::string& text) {
    const auto ids = tokenizer.encode(text);
    if (options.json)
      fmt::print("{}\n", ordered_json(ids).dump());
    else
      fmt::print("{}\n", fmt::join(ids, " "));
  };
  if (!options.text.empty()) return print(options.text);
  for (std::string line; std::getline(std::cin, line);) print(line);
}

void decode(const Options& options) {
  const Tokenizer tokenizer = Tokenizer::load(options.tokenizer);
  for (const int32_t id : options.ids)
    if (id < 0 || id >= tokenizer.vocab_size())
      throw Error(ErrorCode::kUsage, "IDS", fmt::format("{} is not an id of {}", id, options.tokenizer),
                  fmt::format("Use 0 to {}", tokenizer.vocab_size() - 1));
  const std::string text = tokenizer.decode(options.ids, !options.keep_special);
  fmt::print("{}\n", options.json ? json_quote(text) : text);
}

void pack_inputs(Options& options) {
  static const std::map<std::string, SplitText> kSplits = {{"file", SplitText::kFile},
                                                           {"paragraph", SplitText::kParagraph},
                                                           {"line", SplitText::kLine},
                                                           {"page", SplitText::kPage}};
  const auto start = std::chrono::steady_clock::now();
  const Tokenizer tokenizer = Tokenizer::load(options.tokenizer);
  options.pack.split = kSplits.at(options.split);
  options.pack.threads = processors();
  const bool terminal = ::isatty(STDERR_FILENO) != 0;
  const auto progress = [&](const PackSummary& done, int64_t total) {
    if (terminal && !options.json)
      fmt::print(stderr, "\r{} of {}, {} documents, {} tokens ", megabytes(done.bytes), megabytes(total),
                 done.documents, done.tokens);
  };
  const PackSummary done = pack(tokenizer, options.pack, progress);
  if (options.json) {
    fmt::print("{}\n", ordered_json{{"output", options.pack.output},
                                    {"documents", done.documents},
                                    {"tokens", done.tokens},
                                    {"trained_tokens", done.trained_tokens},
                                    {"bytes", done.bytes},
                                    {"empty_documents", done.empty_documents},
                                    {"mask", done.with_mask},
                                    {"seconds", seconds_since(start)}}
                           .dump());
    return;
  }
  if (terminal) std::fputs("\r\033[K", stderr);
  fmt::print("{}: {} documents, {} tokens{}, {} of text ({:.2f} bytes a token) in {:.1f} s\n", options.pack.output,
             done.documents, done.tokens,
             done.with_mask ? fmt::format(" ({} of them trained)", done.trained_tokens) : "", megabytes(done.bytes),
             static_cast<double>(done.bytes) / static_cast<double>(std::max<int64_t>(1, done.tokens)),
             seconds_since(start));
  if (done.empty_documents > 0) fmt::print("left out: {} empty documents\n", done.empty_documents);
}

// Counts of documents by length: bucket b holds lengths of [2^b, 2^(b+1)), bucket 0 also 0.
std::vector<int64_t> length_histogram(const IndexedDataset& data) {
  std::vector<int64_t> counts;
  for (int64_t d = 0; d < data.documents(); ++d) {
    const size_t bucket = std::bit_width(static_cast<uint64_t>(std::max<int64_t>(1, data.document_tokens(d)))) - 1;
    if (bucket >= counts.size()) counts.resize(bucket + 1);
    ++counts[bucket];
  }
  return counts;
}

void inspect(const Options& options) {
  const IndexedDataset data(options.prefix);
  std::optional<Tokenizer> tokenizer;
  if (!options.tokenizer.empty()) tokenizer.emplace(Tokenizer::load(options.tokenizer));
  const int64_t vocab_size = tokenizer ? tokenizer->vocab_size() : INT32_MAX;
  data.check_vocabulary(vocab_size);
  const int64_t trained = data.has_mask() ? data.check_mask() : data.tokens();
  int64_t longest = 0;
  for (int64_t d = 0; d < data.documents(); ++d) longest = std::max(longest, data.document_tokens(d));
  const auto counts = length_histogram(data);
  const auto document = [&](int64_t d) {
    std::vector<int32_t> ids(static_cast<size_t>(std::min<int64_t>(data.document_tokens(d), 256)));
    data.read(d, 0, static_cast<int64_t>(ids.size()), vocab_size, ids.data());
    return ids;
  };
  const int64_t shown = std::min(options.show, data.documents());
  if (options.json) {
    ordered_json histogram = ordered_json::array();
    for (size_t b = 0; b < counts.size(); ++b)
      histogram.push_back({{"from", b == 0 ? 0 : int64_t{1} << b}, {"documents", counts[b]}});
    fmt::print("{}\n", ordered_json{{"prefix", options.prefix},
                                    {"documents", data.documents()},
                                    {"tokens", data.tokens()},
                                    {"trained_tokens", trained},
                                    {"mask", data.has_mask()},
                                    {"longest", longest},
                                    {"lengths", histogram}}
                           .dump());
    for (int64_t d = 0; d < shown; ++d) {
      ordered_json line = {{"document", d}, {"tokens", data.document_tokens(d)}, {"ids", document(d)}};
      if (tokenizer) line["text"] = tokenizer->decode(document(d), false);
      fmt::print("{}\n", line.dump(-1, ' ', false, ordered_json::error_handler_t::replace));
    }
    return;
  }
  fmt::print("{}: {} documents, {} tokens{}, the longest of {}\n", options.prefix, data.documents(), data.tokens(),
             data.has_mask() ? fmt::format(" ({} of them trained)", trained) : "", longest);
  int64_t most = 1;
  for (const int64_t count : counts) most = std::max(most, count);
  for (size_t b = 0; b < counts.size(); ++b)
    if (counts[b] > 0)
      fmt::print("  {:>9} to {:>9} tokens: {:>9} {}\n", b == 0 ? 0 : int64_t{1} << b, (int64_t{2} << b) - 1, counts[b],
                 std::string(static_cast<size_t>((counts[b] * 40 + most - 1) / most), '#'));
  for (int64_t d = 0; d < shown; ++d) {
    const auto ids = document(d);
    const bool cut = static_cast<int64_t>(ids.size()) < data.document_tokens(d);
    fmt::print("-- document {} ({} tokens)\n{}{}\n", d, data.document_tokens(d),
               tokenizer ? tokenizer->decode(ids, false) : fmt::format("{}", fmt::join(ids, " ")), cut ? " ..." : "");
  }
}

void add_tokenizer_commands(CLI::App& data, const std::shared_ptr<Options>& options) {
  CLI::App* tokenizer = data.add_subcommand("tokenizer", "train a tokenizer, or try one");
  tokenizer->require_subcommand(1);

  CLI::App* command =
      tokenizer->add_subcommand("train", "byte-pair encoding with byte fallback, in files that AutoTokenizer opens");
  command->add_option("--input", options->training.inputs, "UTF-8 text files")->required();
  command->add_option("--vocab-size", options->training.vocab_size, "number of tokens, exactly")->capture_default_str();
  command->add_option("--output", options->output, "folder to write")->required()->check(folder_to_write());
  command->add_option("--max-bytes", options->training.max_bytes, "above it every n-th line is used")
      ->capture_default_str()
      ->check(whole_number(1, INT64_MAX));
  command->add_flag("--json", options->json, "print one JSON object");
  command->callback([options] { train(*options); });

  command = tokenizer->add_subcommand("encode",
                                      "text to ids: a line of ids for the TEXT, or for each line of standard input");
  command->add_option("text", options->text, "the text");
  command->add_option("--tokenizer", options->tokenizer, "folder or tokenizer.model")->required();
  command->add_flag("--json", options->json, "print each line as a JSON list");
  command->callback([options] { encode(*options); });

  command = tokenizer->add_subcommand("decode", "ids to text");
  command->add_option("ids", options->ids, "the ids")->required();
  command->add_option("--tokenizer", options->tokenizer, "folder or tokenizer.model")->required();
  command->add_flag("--special", options->keep_special, "show control tokens too");
  command->add_flag("--json", options->json, "print a JSON string");
  command->callback([options] { decode(*options); });
}

}  // namespace

void add_data_command(CLI::App& app) {
  const auto options = std::make_shared<Options>();
  CLI::App* data = app.add_subcommand("data", "train a tokenizer, make and look into token files");
  data->require_subcommand(1);
  add_tokenizer_commands(*data, options);

  CLI::App* command = data->add_subcommand(
      "pack",
      "text and JSONL to a .bin/.idx pair, with an .lsm loss mask for conversations\n"
      "A line of a .jsonl file is one of\n"
      "  {\"text\": \"..\"}\n"
      "  {\"src\": [..], \"tgt\": [..], \"label\"?: [0|1, ..], \"system\"?: \"..\", \"is_system\"?: 0|1}\n"
      "  {\"instruction\": \"..\", \"input\"?: \"..\", \"output\": \"..\", \"history\"?: [[q, a], ..], \"system\"?: "
      "\"..\"}\n"
      "  {\"messages\": [{\"role\": \"system|user|assistant\", \"content\": \"..\", \"label\"?: 0|1}, ..]}\n"
      "Any other file is UTF-8 text.");
  command->add_option("inputs", options->pack.inputs, "files")->required();
  command->add_option("--tokenizer", options->tokenizer, "folder or tokenizer.model")->required();
  command->add_option("--output", options->pack.output, "prefix of the files to write")
      ->required()
      ->check(path_to_write());
  command
      ->add_option("--split", options->split,
                   "documents of a text file: all of it, between blank lines, lines, between form feeds")
      ->check(CLI::IsMember({"file", "paragraph", "line", "page"}))
      ->capture_default_str();
  command->add_flag("--json", options->json, "print the summary as a JSON object");
  command->callback([options] { pack_inputs(*options); });

  command = data->add_subcommand("inspect", "counts, lengths and the first documents of a .bin/.idx pair");
  command->add_option("prefix", options->prefix, "path without .idx")->required();
  command->add_option("--tokenizer", options->tokenizer, "to show text and check the ids; folder or tokenizer.model");
  command->add_option("--documents", options->show, "how many to show")
      ->capture_default_str()
      ->check(whole_number(0, INT64_MAX));
  command->add_flag("--json", options->json, "print one JSON object, then one a document");
  command->callback([options] { inspect(*options); });
}

}  // namespace concerto
