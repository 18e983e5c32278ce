#include "concerto/data/tokenizer.h"

#include "concerto/data/test_data.h"

namespace concerto {
namespace {

std::vector<std::string> texts() {
  return {"",
          " ",
          "The quick brown fox",
          "  two  leading and   inner blanks ",
          "tabs\tand\nnew\r\nlines\n",
          "中文，标点。混合 English",
          "emoji 🙂🚀 and 👩‍👩‍👧 family",
          "rare: \u0416 \u00df \u1e9e \u2603",
          std::string("nul \0 byte", 10),
          "</s> spelt out, <s> too"};
}

TEST(Tokenizer, EveryTextComesBack) {
  const Tokenizer& tokenizer = sample_tokenizer();
  for (const auto& text : texts()) {
    EXPECT_EQ(tokenizer.decode(tokenizer.encode(text, SpecialText::kAsText)), text);
    EXPECT_EQ(tokenizer.decode(tokenizer.encode(text), false), text);
  }
}

TEST(Tokenizer, TrainingGivesTheSizeAskedAndErniesIds) {
  const Tokenizer& tokenizer = sample_tokenizer();
  EXPECT_EQ(tokenizer.vocab_size(), 420);
  EXPECT_EQ(tokenizer.pad_id(), 0);
  EXPECT_EQ(tokenizer.bos_id(), 1);
  EXPECT_EQ(tokenizer.eos_id(), 2);
  EXPECT_EQ(tokenizer.token_id("<|begin_of_sentence|>"), 3);
  EXPECT_EQ(tokenizer.token_id("<|end_of_sentence|>"), 4);
  EXPECT_EQ(tokenizer.token_id("no such token"), -1);
  EXPECT_EQ(tokenizer.token(420), "");
  EXPECT_EQ(tokenizer.token(-1), "");
}

TEST(Tokenizer, TrainingIsDeterministic) {
  const TestFolder folder;
  const auto text = folder.write("text.txt", sample_text());
  train_tokenizer({.inputs = {text}, .vocab_size = 400}).save(folder / "a");
  train_tokenizer({.inputs = {text}, .vocab_size = 400}).save(folder / "b");
  for (const char* name : {"tokenizer.model", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"}) {
    EXPECT_FALSE(read_text(folder / "a/" + name).empty()) << name;
    EXPECT_TRUE(read_text(folder / "a/" + name) == read_text(folder / "b/" + name)) << name;
  }
}

TEST(Tokenizer, ASmallTextIsFilledUpWithUnusedPieces) {
  const TestFolder folder;
  const Tokenizer tokenizer = train_tokenizer({.inputs = {folder.write("t", "abc abd\n")}, .vocab_size = 512});
  EXPECT_EQ(tokenizer.vocab_size(), 512);
  EXPECT_EQ(tokenizer.token(511), "<|unused_511|>");
  EXPECT_EQ(tokenizer.decode(tokenizer.encode("<|unused_511|> abc")), "<|unused_511|> abc");
  for (const int32_t id : tokenizer.encode("<|unused_511|>")) EXPECT_NE(id, 511);
}

TEST(Tokenizer, TrainingNamesWhatIsWrong) {
  const TestFolder folder;
  expect_error(ErrorCode::kUsage, {"--vocab-size", "100"},
               [&] { train_tokenizer({.inputs = {folder.write("a", "x\n")}, .vocab_size = 100}); });
  expect_error(ErrorCode::kIo, {"missing"}, [&] { train_tokenizer({.inputs = {folder / "missing"}}); });
  expect_error(ErrorCode::kData, {"no text"}, [&] { train_tokenizer({.inputs = {folder.write("b", "\n\n")}}); });
  expect_error(ErrorCode::kData, {"c:2", "UTF-8"},
               [&] { train_tokenizer({.inputs = {folder.write("c", "fine\nbad \xff\n")}}); });
}

TEST(Tokenizer, SavedFolderReadsBackAlike) {
  const TestFolder folder;
  sample_tokenizer().save(folder / "model");
  const Tokenizer read = Tokenizer::load(folder / "model"), alone = Tokenizer::load(folder / "model/tokenizer.model");
  for (const auto& text : texts()) {
    EXPECT_EQ(read.encode(text), sample_tokenizer().encode(text));
    EXPECT_EQ(alone.encode(text), sample_tokenizer().encode(text));
  }
  EXPECT_EQ(read.eos_id(), 2);
  EXPECT_EQ(read.pad_id(), 0);
  EXPECT_EQ(read.chat_template().name, "ernie_nothink");
  read.save(folder / "again");
  for (const char* name : {"tokenizer.model", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"})
    EXPECT_TRUE(read_text(folder / "model/" + name) == read_text(folder / "again/" + name)) << name;
}

TEST(Tokenizer, ControlTokensInTextAreTokensOrText) {
  const Tokenizer& tokenizer = sample_tokenizer();
  const auto as_tokens = tokenizer.encode("The</s><|end_of_sentence|>");
  ASSERT_GE(as_tokens.size(), 3u);
  EXPECT_EQ(as_tokens[as_tokens.size() - 2], 2);
  EXPECT_EQ(as_tokens.back(), 4);
  for (const int32_t id : tokenizer.encode("The</s>", SpecialText::kAsText)) EXPECT_FALSE(tokenizer.is_special(id));
  EXPECT_EQ(tokenizer.decode(as_tokens), "The");
}

// A Hugging Face folder that adds tokens to the model's own.
TEST(Tokenizer, AddedTokensMatchLongestFirst) {
  const TestFolder folder;
  sample_tokenizer().save(folder / "model");
  folder.write("model/added_tokens.json", R"({"<tool>": 420, "<tool>!": 421})");
  folder.write("model/tokenizer_config.json", R"({
    "eos_token": {"content": "<eot>"}, "pad_token": "<unk>", "bos_token": "<s>", "additional_special_tokens": ["<tool>"],
    "added_tokens_decoder": {"425": {"content": "<eot>", "special": true}, "426": {"content": "<gap>", "lstrip": true, "rstrip": true}}})");
  const Tokenizer tokenizer = Tokenizer::load(folder / "model");
  EXPECT_EQ(tokenizer.vocab_size(), 427);
  EXPECT_EQ(tokenizer.eos_id(), 425);
  EXPECT_TRUE(tokenizer.is_special(420));
  EXPECT_FALSE(tokenizer.is_special(421));
  const auto the = tokenizer.encode("The"), dog = tokenizer.encode("dog");
  const auto join = [](std::initializer_list<std::vector<int32_t>> parts) {
    std::vector<int32_t> all;
    for (const auto& part : parts) all.insert(all.end(), part.begin(), part.end());
    return all;
  };
  EXPECT_EQ(tokenizer.encode("The<tool>!dog<tool>"), join({the, {421}, dog, {420}}));
  EXPECT_EQ(tokenizer.encode("The <gap> \tdog"), join({the, {426}, dog}));
  EXPECT_EQ(tokenizer.decode(std::vector<int32_t>{420, 421, 425}), "<tool>!");
  EXPECT_EQ(tokenizer.decode(std::vector<int32_t>{420, 421, 425}, false), "<tool><tool>!<eot>");
}

TEST(Tokenizer, LoadingNamesTheFileAndTheField) {
  const TestFolder folder;
  expect_error(ErrorCode::kIo, {"nowhere"}, [&] { Tokenizer::load(folder / "nowhere"); });
  std::filesystem::create_directories(folder / "empty");
  expect_error(ErrorCode::kData, {"empty", "tokenizer.model"}, [&] { Tokenizer::load(folder / "empty"); });
  expect_error(ErrorCode::kData, {"bad.model"},
               [&] { Tokenizer::load(folder.write("bad.model", "\x0a\xff\xff\xff\xff")); });
  expect_error(ErrorCode::kData, {"none.model", "pieces"}, [&] { Tokenizer::load(folder.write("none.model", "")); });
  sample_tokenizer().save(folder / "model");
  const std::string whole = read_text(folder / "model/tokenizer.model");
  expect_error(ErrorCode::kData, {"cut.model"},
               [&] { Tokenizer::load(folder.write("cut.model", whole.substr(0, whole.size() / 2))); });
  for (const auto& [text, part] : std::vector<std::pair<std::string, std::string>>{
           {"[]", "object"},
           {"{", "tokenizer_config.json"},
           {R"({"added_tokens_decoder": 1})", "added_tokens_decoder"},
           {R"({"added_tokens_decoder": {"x": "a"}})", "'x'"},
           {R"({"added_tokens_decoder": {"999999999": "a"}})", "999999999"},
           {R"({"added_tokens_decoder": {"5": {}}})", "content"},
           {R"({"added_tokens_decoder": {"5": {"content": "a", "single_word": true}}})", "single_word"}}) {
    folder.write("model/tokenizer_config.json", text);
    expect_error(ErrorCode::kData, {"tokenizer_config.json", part}, [&] { Tokenizer::load(folder / "model"); });
  }
  folder.write("model/tokenizer_config.json", "{}");
  folder.write("model/added_tokens.json", R"({"a": "b"})");
  expect_error(ErrorCode::kData, {"added_tokens.json", "'a'"}, [&] { Tokenizer::load(folder / "model"); });
}

// An added token without text would match everywhere and never end.
TEST(Tokenizer, AnAddedTokenHasText) {
  const TestFolder folder;
  sample_tokenizer().save(folder / "model");
  folder.write("model/added_tokens.json", R"({"": 420})");
  expect_error(ErrorCode::kData, {"added_tokens.json", "without text"}, [&] { Tokenizer::load(folder / "model"); });
}

TEST(Tokenizer, AFolderThatIsNotThereIsNamed) {
  expect_error(ErrorCode::kIo, {"no/such/folder", "concerto data tokenizer train"},
               [] { Tokenizer::load("no/such/folder"); });
}

TEST(Tokenizer, ChatIsRenderedAsErnieDoes) {
  const std::vector<ChatMessage> messages = {
      {"system", "Be brief."}, {"user", "2+2?"}, {"assistant", "4"}, {"user", "And 3?"}};
  const Tokenizer& tokenizer = sample_tokenizer();
  EXPECT_EQ(tokenizer.render_chat(messages),
            "<|begin_of_sentence|>Be brief.\nUser: 2+2?\nAssistant: 4<|end_of_sentence|>User: And 3?\nAssistant: ");
  EXPECT_EQ(tokenizer.render_chat(std::span(messages).first(2), false), "<|begin_of_sentence|>Be brief.\nUser: 2+2?\n");
  EXPECT_EQ(tokenizer.encode(tokenizer.render_chat(messages)).front(), 3);
  expect_error(ErrorCode::kData, {"role", "tool"}, [&] {
    tokenizer.render_chat(std::vector<ChatMessage>{{"tool", "x"}});
  });
}

TEST(Tokenizer, AChatTemplateThatIsNotKnownIsNamed) {
  const TestFolder folder;
  sample_tokenizer().save(folder / "model");
  folder.write("model/tokenizer_config.json", R"({"chat_template": "{{ something else }}"})");
  expect_error(ErrorCode::kData, {"chat template", "ernie_nothink", "chatml"},
               [&] { Tokenizer::load(folder / "model").chat_template(); });
  folder.write("model/tokenizer_config.json", R"({"eos_token": "</s>"})");
  expect_error(ErrorCode::kData, {"no chat template", "ernie_nothink"},
               [&] { Tokenizer::load(folder / "model").render_chat({}); });
  folder.write(
      "model/tokenizer_config.json",
      R"J({"chat_template": "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}\n{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"})J");
  EXPECT_EQ(Tokenizer::load(folder / "model").render_chat(std::vector<ChatMessage>{{"user", "hi"}}),
            "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n");
}

TEST(StreamDecoder, GivesWholeCharactersOnly) {
  const Tokenizer& tokenizer = sample_tokenizer();
  const std::string text = "a 🙂 中文 \u1e9e!";
  StreamDecoder decoder(tokenizer);
  std::string joined;
  int held_back = 0;
  for (const int32_t id : tokenizer.encode(text)) {
    const std::string part = decoder.push(id);
    held_back += part.empty();
    joined += part;
    EXPECT_EQ(text.substr(0, joined.size()), joined);
  }
  EXPECT_EQ(joined + decoder.finish(), text);
  EXPECT_GE(held_back, 3);  // the first bytes of the emoji, which is no piece
}

TEST(StreamDecoder, BytesThatAreNoTextBecomeTheReplacementSign) {
  const Tokenizer& tokenizer = sample_tokenizer();
  StreamDecoder decoder(tokenizer);
  EXPECT_EQ(decoder.push(tokenizer.token_id("<0xE4>")), "");
  EXPECT_EQ(decoder.push(tokenizer.token_id("a")),
            "\xef\xbf\xbd"
            "a");
  EXPECT_EQ(decoder.push(tokenizer.token_id("<0xFF>")), "\xef\xbf\xbd");
  EXPECT_EQ(decoder.push(tokenizer.token_id("<0xF0>")), "");
  EXPECT_EQ(decoder.push(tokenizer.eos_id()), "");
  EXPECT_EQ(decoder.push(100000), "");
  EXPECT_EQ(decoder.finish(), "\xef\xbf\xbd");
}

}  // namespace
}  // namespace concerto
