// `concerto eval CONFIG | --model DIR --data PREFIX`: loss and perplexity on a data set.
#pragma once

namespace CLI {
class App;
}

namespace concerto {
void add_eval_command(CLI::App& app);
}  // namespace concerto
