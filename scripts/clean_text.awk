# Turns what Debian's packages hold into plain text for scripts/prepare_quickstart.sh. Documents end with a form feed on a line of its own.
#   awk -v kind=bible|gcide|man|html|book [-v chinese=1] [-v every=N] -f clean_text.awk [FILE]...
# chinese: only paragraphs that hold Chinese, each once. every: only each N-th document. Any awk will do; it must work on bytes (LC_ALL=C).

# One paragraph is gathered in `para`; wrapped lines are joined, with a blank only where no Chinese character meets another.
function add(text) {
  gsub(/([ \t]|\302\240)+/, " ", text)
  sub(/^ /, "", text)
  sub(/ $/, "", text)
  if (text == "") return
  if (para == "") para = text
  else if (para ~ /[\200-\377]$/ && text ~ /^[\200-\377]/) para = para text
  else para = para " " text
}
function end_paragraph() {
  if (para != "" && (!chinese || (para ~ /[\344-\351][\200-\277][\200-\277]/ && !seen[para]++))) doc = doc para "\n"
  para = ""
}
# Short documents are headings and empty pages.
function end_document() {
  end_paragraph()
  if (length(doc) >= 200 && documents++ % (every ? every : 1) == 0) printf "%s\f\n", doc
  doc = ""
}

# The King James Bible as the program `bible` prints it: a heading a chapter, a line a verse with its number.
kind == "bible" && /^[A-Z0-9]/ { end_document(); add($0); end_paragraph(); next }
kind == "bible" { sub(/^ *[0-9]+ /, ""); add($0); end_paragraph(); next }

# A dictionary: a headword at the start of the line, its pronunciation between backslashes, definitions indented, each followed by its source.
kind == "gcide" && /^[^ ].*\\/ {
  if (doc ~ /\[WordNet/ || para ~ /\[WordNet/) { doc = ""; para = "" }  # WordNet's own entries are kept for fine-tuning
  end_document()
  entry = 1
  gsub(/ *\\[^\\]*\\/, "")
  gsub(/ *\([^)]*["[^][^)]*\)/, "")
}
kind == "gcide" {
  if (!entry) next
  if ($0 ~ /^ *$/) { end_paragraph(); next }
  if ($0 ~ /^ *\[(1913 Webster|PJC|RP|Century Dict[^]]*|[A-Z]+)\] *$/) next
  gsub(/[{}]/, "")
  sub(/ *\[1913 Webster\]/, "")
  add($0)
  next
}

# A manual page in roff: text and requests. Each page starts with .TH.
kind == "man" && /^\.(TH|Dt|Dd)/ { end_document(); skip = 0; next }
kind == "man" && /^\.(de|ig)/ { skip = 1; next }
kind == "man" && skip { if ($0 ~ /^\.\./) skip = 0; next }
kind == "man" && (/^['.] *\\"/ || /^'/) { next }
kind == "man" {
  if ($0 ~ /^\.(SH|SS|Sh|Ss)/) {
    end_paragraph()
    sub(/^\.(SH|SS|Sh|Ss) */, "")
    heading = 1
  } else if ($0 ~ /^\.(TP|PP|LP|P|IP|HP|br|sp|Pp|It)/ || $0 ~ /^ *$/) {
    end_paragraph()
    next
  } else if ($0 ~ /^\.(B|I|BR|RB|IR|RI|BI|IB|SM|SB|Nm|Nd|Ar|Fl|Cm) /) {
    sub(/^\.[A-Za-z]+ */, "")
  } else if ($0 ~ /^\./) {
    next
  }
  gsub(/\\f(\[[^]]*\]|\(..|.)/, "")
  gsub(/\\s[-+]?[0-9]/, "")
  gsub(/\\\*(\[[^]]*\]|\(..|.)/, "")
  gsub(/\\\((aq|cq|oq)/, "'")
  gsub(/\\\((lq|rq|dq)/, "\"")
  gsub(/\\\((en|em|hy|mi)/, "-")
  gsub(/\\(\(..|\[[^]]*\])/, "")
  gsub(/\\[&|^c%:]/, "")
  gsub(/\\e/, "\001")
  gsub(/\\/, "")
  gsub(/\001/, "\\")
  if (heading || $0 ~ /^"/) gsub(/"/, "")
  add($0)
  if (heading) { end_paragraph(); heading = 0 }
  next
}

# DocBook's HTML, one page a file.
kind == "html" && FNR == 1 { end_document(); html = 0 }
kind == "html" {
  # The page's text starts after its navigation; tags are cut across lines, so an open one is kept for the next line.
  line = rest $0
  rest = ""
  if (!html) { if (line !~ /<body/) next; html = 1; sub(/.*<body[^>]*>/, "", line) }
  gsub(/Download the ebook/, "", line)
  gsub(/<ul class="docnav[^"]*">.*<\/ul>/, "\n", line)
  gsub(/<(\/p|\/div|\/li|\/h[1-6]|\/pre|\/dt|\/dd|\/tr|br)[^>]*>/, "\n", line)
  gsub(/<[^>]*>/, "", line)
  if (match(line, /<[^>]*$/)) { rest = substr(line, RSTART) " "; line = substr(line, 1, RSTART - 1) }
  gsub(/&lt;/, "<", line)
  gsub(/&gt;/, ">", line)
  gsub(/&quot;/, "\"", line)
  gsub(/(&nbsp;|&#160;|\302\240)/, " ", line)
  gsub(/\342\206\265/, "\n", line)
  gsub(/&amp;/, "\\&", line)
  count = split(line, parts, "\n")
  for (i = 1; i <= count; i++) { add(parts[i]); if (i < count) end_paragraph() }
  next
}

# A book as wrapped text: chapters and sections are numbered, tables are drawn.
kind == "book" && /^(\347\254\254 [0-9]+ \347\253\240|[0-9]+\.[0-9]+\. )/ { end_document(); add($0); end_paragraph(); next }
kind == "book" && /(\342\224|\342\225|---|\+-|^ *\|)/ { next }
kind == "book" && /^ *$/ { end_paragraph(); next }
kind == "book" { add($0); next }

END { if (!(kind == "gcide" && doc para ~ /\[WordNet/)) end_document() }
