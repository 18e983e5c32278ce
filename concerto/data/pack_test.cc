#include "concerto/data/pack.h"

#include "concerto/data/records.h"
#include "concerto/data/test_data.h"

namespace concerto {
namespace {

struct Packed {
  PackSummary summary;
  std::vector<std::string> texts;
  std::vector<std::string> trained;  // what the mask leaves, decoded
};

Packed pack_and_read(const TestFolder& folder, std::vector<std::string> inputs, SplitText split = SplitText::kFile,
                     int threads = 2) {
  const Tokenizer& tokenizer = sample_tokenizer();
  Packed packed;
  packed.summary =
      pack(tokenizer, {.inputs = std::move(inputs), .output = folder / "out", .split = split, .threads = threads});
  const IndexedDataset data(folder / "out");
  EXPECT_EQ(data.documents(), packed.summary.documents);
  EXPECT_EQ(data.tokens(), packed.summary.tokens);
  EXPECT_EQ(data.has_mask(), packed.summary.with_mask);
  for (int64_t d = 0; d < data.documents(); ++d) {
    std::vector<int32_t> ids(data.document_tokens(d)), kept;
    data.read(d, 0, static_cast<int64_t>(ids.size()), tokenizer.vocab_size(), ids.data());
    packed.texts.push_back(tokenizer.decode(ids, false));
    std::vector<uint8_t> mask(ids.size());
    if (data.has_mask()) data.read_mask(d, 0, static_cast<int64_t>(ids.size()), mask.data());
    for (size_t t = 0; t < ids.size(); ++t)
      if (mask[t]) kept.push_back(ids[t]);
    packed.trained.push_back(tokenizer.decode(kept, false));
  }
  return packed;
}

TEST(Pack, TextIsCutAsAsked) {
  const TestFolder folder;
  const auto file = folder.write("a.txt", "one\ntwo\n\n\nthree\n\f\nfour\n");
  using Texts = std::vector<std::string>;
  EXPECT_EQ(pack_and_read(folder, {file}).texts, (Texts{"one\ntwo\n\n\nthree\n\f\nfour</s>"}));
  EXPECT_EQ(pack_and_read(folder, {file}, SplitText::kParagraph).texts,
            (Texts{"one\ntwo</s>", "three</s>", "four</s>"}));
  EXPECT_EQ(pack_and_read(folder, {file}, SplitText::kLine).texts,
            (Texts{"one</s>", "two</s>", "three</s>", "four</s>"}));
  EXPECT_EQ(pack_and_read(folder, {file}, SplitText::kPage).texts, (Texts{"one\ntwo\n\n\nthree</s>", "four</s>"}));
  EXPECT_EQ(pack_and_read(folder, {file, folder.write("b.txt", "五")}).texts.back(), "五</s>");
}

TEST(Pack, AByteOrderMarkIsNoText) {
  const TestFolder folder;
  EXPECT_EQ(pack_and_read(folder, {folder.write("a.txt", "\xef\xbb\xbfone")}).texts.front(), "one</s>");
  EXPECT_EQ(pack_and_read(folder, {folder.write("a.jsonl", "\xef\xbb\xbf{\"text\": \"one\"}\n")}).texts.front(),
            "one</s>");
}

TEST(Pack, ControlTokensInATextStayText) {
  const TestFolder folder;
  const auto packed = pack_and_read(folder, {folder.write("a.txt", "x</s>y")});
  EXPECT_EQ(packed.texts.front(), "x</s>y</s>");
  const IndexedDataset data(folder / "out");
  std::vector<int32_t> ids(data.tokens());
  data.read(0, 0, data.tokens(), 1000, ids.data());
  EXPECT_EQ(std::count(ids.begin(), ids.end(), sample_tokenizer().eos_id()), 1);
}

TEST(Pack, PlainRecords) {
  const TestFolder folder;
  const auto packed = pack_and_read(
      folder,
      {folder.write(
          "a.jsonl",
          "{\"text\": \"Rain\"}\n\n{\"text\": [\"Sun\", \"x\"]}\r\n{\"tgt\": [\"Snow\"]}\n{\"text\": \"\"}\n")});
  EXPECT_EQ(packed.texts, (std::vector<std::string>{"Rain</s>", "Sun</s>", "Snow</s>"}));
  EXPECT_EQ(packed.summary.empty_documents, 1);
  EXPECT_FALSE(packed.summary.with_mask);
}

TEST(Pack, ConversationsGoThroughTheTemplateAndMaskThePrompts) {
  const TestFolder folder;
  const auto packed =
      pack_and_read(folder, {folder.write("a.jsonl",
                                          R"({"system": "Be brief.", "src": ["2+2?", "And?"], "tgt": ["4", "12"]}
{"src": ["2+2?", "And?"], "tgt": ["4", "12"], "label": [0, 1]}
{"src": "hi", "tgt": "ho", "label": [0]}
{"src": ["Be kind.", "hi"], "tgt": ["ho"], "is_system": 1}
{"instruction": "Translate", "input": "chat", "output": "cat", "history": [["a", "b"]], "system": "s"}
{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}, {"role": "assistant", "content": "v"}]}
{"src": ["</s>?"], "tgt": ["</s>!"]}
)")});
  const std::string begin = "<|begin_of_sentence|>", end = "<|end_of_sentence|>";
  EXPECT_EQ(packed.texts, (std::vector<std::string>{
                              begin + "Be brief.\nUser: 2+2?\nAssistant: 4" + end + "User: And?\nAssistant: 12</s>",
                              begin + "User: 2+2?\nAssistant: 4" + end + "User: And?\nAssistant: 12</s>",
                              begin + "User: hi\nAssistant: ho</s>", begin + "Be kind.\nUser: hi\nAssistant: ho</s>",
                              begin + "s\nUser: a\nAssistant: b" + end + "User: Translate\nchat\nAssistant: cat</s>",
                              begin + "s\nUser: u\nAssistant: v</s>", begin + "User: </s>?\nAssistant: </s>!</s>"}));
  EXPECT_EQ(packed.trained,
            (std::vector<std::string>{"412</s>", "12</s>", "", "ho</s>", "bcat</s>", "v</s>", "</s>!</s>"}));
  EXPECT_TRUE(packed.summary.with_mask);
  EXPECT_LT(packed.summary.trained_tokens, packed.summary.tokens);
}

// The model is asked with the ids that it was trained on: SentencePiece joins "User: " and "What" otherwise when the
// parts come one by one.
TEST(Pack, APromptIsEncodedAsAChatIs) {
  const Tokenizer& tokenizer = sample_tokenizer();
  const std::vector<std::string> prompts = {"fox jumps", "What is the meaning of it?", " two  blanks ", "", "\n", "x",
                                            "2+2?"};
  const auto expect_same = [&](const Record& record, const std::vector<ChatMessage>& messages) {
    TokenizedRecord packed;
    tokenize_record(tokenizer, record, "here", packed);
    std::vector<int32_t> prompt = packed.ids;
    prompt.resize(
        static_cast<size_t>(std::find(packed.trained.begin(), packed.trained.end(), 1) - packed.trained.begin()));
    EXPECT_EQ(prompt, tokenizer.encode(tokenizer.render_chat(messages))) << messages.back().content;
    EXPECT_EQ(prompt, tokenizer.encode_chat(messages));
  };
  std::vector<int32_t> apart = tokenizer.encode("User: ");
  const std::vector<int32_t> prompt_alone = tokenizer.encode("fox jumps");
  apart.insert(apart.end(), prompt_alone.begin(), prompt_alone.end());
  ASSERT_NE(apart, tokenizer.encode("User: fox jumps")) << "nothing would be seen";
  for (const std::string& prompt : prompts) {
    expect_same({.conversation = true, .turns = {{prompt, "answer"}}}, {{"user", prompt}});
    expect_same({.conversation = true, .system = "Be brief.", .turns = {{prompt, "answer"}}},
                {{"system", "Be brief."}, {"user", prompt}});
  }
  // A later turn, from the sign before it on.
  TokenizedRecord packed;
  tokenize_record(tokenizer, {.conversation = true, .turns = {{"2+2?", "4"}, {"What now?", "12"}}}, "here", packed);
  const std::vector<int32_t> turn = tokenizer.encode("<|end_of_sentence|>User: What now?\nAssistant: ");
  EXPECT_NE(std::search(packed.ids.begin(), packed.ids.end(), turn.begin(), turn.end()), packed.ids.end());
}

TEST(Pack, ControlWordsInATextStayText) {
  const Tokenizer& tokenizer = sample_tokenizer();
  const std::string spelt = "a</s> <|begin_of_sentence|>", half = "</";
  const std::vector<ChatMessage> messages = {{"user", spelt}};
  const std::vector<int32_t> ids = tokenizer.encode_chat(messages);
  EXPECT_EQ(std::count(ids.begin(), ids.end(), tokenizer.token_id("</s>")), 0);
  EXPECT_EQ(std::count(ids.begin(), ids.end(), tokenizer.token_id("<|begin_of_sentence|>")), 1);
  EXPECT_EQ(tokenizer.decode(ids, false), tokenizer.render_chat(messages));
  // Nor does a word that begins in a text and ends in the template.
  const std::vector<TextPart> parts = {{half, SpecialText::kAsText}, {"s>"}};
  EXPECT_NE(tokenizer.encode(parts), tokenizer.encode("</s>"));
}

TEST(Pack, ThreadsDoNotChangeTheFiles) {
  const TestFolder folder;
  std::string lines;
  for (int i = 0; i < 500; ++i) lines += fmt::format("{{\"text\": \"document {} {}\"}}\n", i, std::string(i % 50, 'x'));
  const auto file = folder.write("a.jsonl", lines);
  pack_and_read(folder, {file}, SplitText::kFile, 1);
  const std::string bin = read_text(folder / "out.bin"), idx = read_text(folder / "out.idx");
  pack_and_read(folder, {file}, SplitText::kFile, 4);
  EXPECT_TRUE(read_text(folder / "out.bin") == bin);
  EXPECT_TRUE(read_text(folder / "out.idx") == idx);
}

TEST(Pack, ABrokenLineIsNamedAndNothingIsLeft) {
  const TestFolder folder;
  const auto refuse = [&](const std::string& content, const std::vector<std::string>& parts,
                          const char* name = "a.jsonl") {
    expect_error(ErrorCode::kData, parts, [&] {
      pack(sample_tokenizer(), {.inputs = {folder.write(name, content)}, .output = folder / "out"});
    });
    for (const char* ending : {".bin", ".idx", ".lsm", ".bin.tmp", ".lsm.tmp"})
      EXPECT_FALSE(std::filesystem::exists(folder / std::string("out") + ending));
  };
  const std::string good = "{\"text\": \"x\"}\n";
  refuse(good + good + "{\"text\": \"x\"\n" + good, {"a.jsonl:3"});
  refuse(good + "{\"text\": \"\xff\"}\n", {"a.jsonl:2"});
  refuse(good + "{\"text\": \"x\"\n", {"a.jsonl:2: not valid JSON: column 13: ", "Correct or remove the line"});
  refuse(good + "\n[1]\n", {"a.jsonl:3", "object"});
  refuse("[\n {\"text\": \"x\"}\n]\n", {"a.jsonl:1: a JSON list", "jq -c"});
  refuse(good + "3\n", {"a.jsonl:2", "not a JSON object"});
  refuse("{\"word\": 1}\n", {"a.jsonl:1", "text"});
  refuse("{\"text\": 1}\n", {"a.jsonl:1", "'text'"});
  refuse("{\"text\": []}\n", {"a.jsonl:1", "'text'"});
  refuse("{\"text\": [1]}\n", {"a.jsonl:1", "'text'"});
  refuse("{\"src\": [\"a\"], \"tgt\": []}\n", {"a.jsonl:1", "1 prompts", "0 answers"});
  refuse("{\"src\": [], \"tgt\": [\"a\"], \"is_system\": 1}\n", {"a.jsonl:1", "is_system"});
  refuse("{\"src\": [\"a\"], \"tgt\": [\"b\"], \"label\": [2]}\n", {"a.jsonl:1", "label"});
  refuse("{\"src\": [\"a\"], \"tgt\": [\"b\"], \"label\": 1}\n", {"a.jsonl:1", "label"});
  refuse("{\"src\": [\"a\"], \"tgt\": [\"b\"], \"system\": 1}\n", {"a.jsonl:1", "system"});
  refuse("{\"instruction\": \"a\", \"output\": \"b\", \"history\": [1]}\n", {"a.jsonl:1", "history"});
  refuse("{\"messages\": [{\"role\": \"assistant\", \"content\": \"b\"}]}\n", {"a.jsonl:1", "assistant"});
  refuse("{\"messages\": [{\"role\": \"user\", \"content\": \"b\"}]}\n", {"a.jsonl:1", "answer"});
  refuse("{\"messages\": 1}\n", {"a.jsonl:1", "messages"});
  refuse(good + "{\"src\": [\"a\"], \"tgt\": [\"b\"]}\n", {"a.jsonl:2", "conversation"});
  refuse("{\"src\": [\"a\"], \"tgt\": [\"b\"]}\n" + good, {"a.jsonl:2", "plain"});
  refuse("\n \n", {"no text"});
  refuse("fine\nbad \xc3(\n", {"t.txt:2", "UTF-8"}, "t.txt");
  expect_error(ErrorCode::kIo, {"missing"},
               [&] { pack(sample_tokenizer(), {.inputs = {folder / "missing"}, .output = folder / "out"}); });
}

TEST(Pack, ReportsProgress) {
  const TestFolder folder;
  std::string text;
  for (int i = 0; i < 20000; ++i) text += "some line of text that is packed as a document of its own\n";
  int64_t calls = 0, last = 0;
  const auto summary =
      pack(sample_tokenizer(),
           {.inputs = {folder.write("a.txt", text)}, .output = folder / "out", .split = SplitText::kLine},
           [&](const PackSummary& done, int64_t total) {
             ++calls;
             EXPECT_GE(done.bytes, last);
             EXPECT_EQ(total, static_cast<int64_t>(text.size()));
             last = done.bytes;
           });
  EXPECT_GE(calls, 2);
  EXPECT_EQ(last, static_cast<int64_t>(text.size()));
  EXPECT_EQ(summary.documents, 20000);
}

TEST(Records, ANamelessTokenizerCannotEndADocument) {
  const TestFolder folder;
  sample_tokenizer().save(folder / "model");
  folder.write("model/tokenizer_config.json", R"({"eos_token": "<nowhere>"})");
  TokenizedRecord out;
  expect_error(ErrorCode::kData, {"here", "eos"},
               [&] { tokenize_record(Tokenizer::load(folder / "model"), {.text = "x"}, "here", out); });
}

}  // namespace
}  // namespace concerto
