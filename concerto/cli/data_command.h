// `concerto data tokenizer train|encode|decode | pack | inspect`: makes tokenizers and token files and looks into them.
#pragma once

namespace CLI {
class App;
}

namespace concerto {

void add_data_command(CLI::App& app);

}  // namespace concerto
