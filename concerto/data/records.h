// One line of a JSONL training file: plain text for pre-training, or a conversation for fine-tuning.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "concerto/data/tokenizer.h"

namespace concerto {

struct Record {
  struct Turn {
    std::string prompt, answer;
    bool trained = true;
  };
  bool conversation = false;
  std::string text = {};  // of a plain one
  std::string system = {};
  std::vector<Turn> turns = {};
};

// Kinds, told apart by their keys:
//   {"text": "..."} or a list whose first item is used; {"tgt": ["..."]} alone means the same
//   {"src": [..], "tgt": [..], "label"?: [..], "system"?: "..", "is_system"?: 0|1}   ERNIEKit; a string stands for a
//   list of one
//   {"instruction": "..", "input"?: "..", "output": "..", "history"?: [[q, a], ..], "system"?: ".."}   Alpaca
//   {"messages": [{"role": system|user|assistant, "content": "..", "label"?: 0|1}, ..]}
// Error(kData) at `where` (FILE:LINE) for anything else.
Record parse_record(std::string_view line, const std::string& where);

struct TokenizedRecord {
  std::vector<int32_t> ids;
  std::vector<uint8_t> trained;  // [ids] of a conversation: 1 on the answers that are trained, with the end after the
                                 // last one; empty for plain text
};
// Plain text: its tokens and eos. A conversation: through the tokenizer's chat template; what comes before an answer is
// encoded as one text, as a chat that asks for the answer is (Tokenizer::encode_chat), and the answer as another, as it
// is generated. Control tokens come from the template only; one spelt out in a text stays text. `where` names the record in errors. The buffers are used again.
void tokenize_record(const Tokenizer& tokenizer, const Record& record, const std::string& where, TokenizedRecord& out);

}  // namespace concerto
