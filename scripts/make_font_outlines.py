#!/usr/bin/env python3
"""Make concerto/train/font_outlines.cc, the letters of the pictures, from a TrueType font.

    scripts/make_font_outlines.py /usr/share/fonts/truetype/dejavu/DejaVuSans.ttf > concerto/train/font_outlines.cc

Run by hand; needs nothing but Python. Only what DejaVu Sans uses of the format is read.
"""
import struct
import sys
import textwrap

CHARACTERS = [chr(c) for c in range(32, 127)]
UNITS = 512  # an em in the numbers that are written

LICENSE = """\
Outlines of DejaVu Sans. Fonts are (c) Bitstream (see below). DejaVu changes are in public domain.

Bitstream Vera Fonts Copyright. Copyright (c) 2003 by Bitstream, Inc. All Rights Reserved. Bitstream Vera is a trademark
of Bitstream, Inc.

Permission is hereby granted, free of charge, to any person obtaining a copy of the fonts accompanying this license
("Fonts") and associated documentation files (the "Font Software"), to reproduce and distribute the Font Software,
including without limitation the rights to use, copy, merge, publish, distribute, and/or sell copies of the Font
Software, and to permit persons to whom the Font Software is furnished to do so, subject to the following conditions:

The above copyright and trademark notices and this permission notice shall be included in all copies of one or more of
the Font Software typefaces.

The Font Software may be modified, altered, or added to, and in particular the designs of glyphs or characters in the
Fonts may be modified and additional glyphs or characters may be added to the Fonts, only if the fonts are renamed to
names not containing either the words "Bitstream" or the word "Vera".

This License becomes null and void to the extent applicable to Fonts or Font Software that has been modified and is
distributed under the "Bitstream Vera" names.

The Font Software may be sold as part of a larger software package but no copy of one or more of the Font Software
typefaces may be sold by itself.

THE FONT SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT NOT LIMITED TO
ANY WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT OF COPYRIGHT, PATENT, TRADEMARK,
OR OTHER RIGHT. IN NO EVENT SHALL BITSTREAM OR THE GNOME FOUNDATION BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER LIABILITY,
INCLUDING ANY GENERAL, SPECIAL, INDIRECT, INCIDENTAL, OR CONSEQUENTIAL DAMAGES, WHETHER IN AN ACTION OF CONTRACT, TORT
OR OTHERWISE, ARISING FROM, OUT OF THE USE OR INABILITY TO USE THE FONT SOFTWARE OR FROM OTHER DEALINGS IN THE FONT
SOFTWARE.

Except as contained in this notice, the names of Gnome, the Gnome Foundation, and Bitstream Inc., shall not be used in
advertising or otherwise to promote the sale, use or other dealings in this Font Software without prior written
authorization from the Gnome Foundation or Bitstream Inc., respectively. For further information, contact: fonts at
gnome dot org."""


class Font:
    def __init__(self, data):
        self.data = data
        tables = struct.unpack(">H", data[4:6])[0]
        self.tables = {}
        for i in range(tables):
            tag, _, offset, _ = struct.unpack(">4sIII", data[12 + 16 * i : 28 + 16 * i])
            self.tables[tag] = offset
        self.em = self.u16(self.tables[b"head"] + 18)
        self.long_offsets = self.u16(self.tables[b"head"] + 50)
        self.metrics = self.u16(self.tables[b"hhea"] + 34)

    def u16(self, at):
        return struct.unpack(">H", self.data[at : at + 2])[0]

    def i16(self, at):
        return struct.unpack(">h", self.data[at : at + 2])[0]

    def glyph_of(self, code):
        cmap = self.tables[b"cmap"]
        for i in range(self.u16(cmap + 2)):
            at = cmap + struct.unpack(">I", self.data[cmap + 8 + 8 * i : cmap + 12 + 8 * i])[0]
            if self.u16(at) != 4:
                continue
            twice = self.u16(at + 6)
            for s in range(0, twice, 2):
                if code > self.u16(at + 14 + s):
                    continue
                start, delta = self.u16(at + 16 + twice + s), self.u16(at + 16 + 2 * twice + s)
                where = at + 16 + 3 * twice + s
                if code < start:
                    return 0
                if self.u16(where) == 0:
                    return (code + delta) & 0xFFFF
                return self.u16(where + self.u16(where) + 2 * (code - start))
        raise SystemExit("the font has no cmap of format 4")

    def advance(self, glyph):
        return self.u16(self.tables[b"hmtx"] + 4 * min(glyph, self.metrics - 1))

    def contours(self, glyph):
        loca = self.tables[b"loca"]
        if self.long_offsets:
            begin, end = struct.unpack(">II", self.data[loca + 4 * glyph : loca + 4 * glyph + 8])
        else:
            begin, end = (2 * v for v in struct.unpack(">HH", self.data[loca + 2 * glyph : loca + 2 * glyph + 4]))
        at = self.tables[b"glyf"] + begin
        if begin == end:
            return []
        count = self.i16(at)
        return self.simple(at, count) if count >= 0 else self.compound(at + 10)

    def compound(self, at):
        result = []
        while True:
            flags, glyph = self.u16(at), self.u16(at + 2)
            if flags & 1:
                dx, dy, at = self.i16(at + 4), self.i16(at + 6), at + 8
            else:
                dx, dy = struct.unpack("bb", self.data[at + 4 : at + 6])
                at += 6
            if flags & (8 | 64 | 128):
                raise SystemExit("a scaled part of a letter is not supported")
            result += [[(x + dx, y + dy, on) for x, y, on in c] for c in self.contours(glyph)]
            if not flags & 32:
                return result

    def simple(self, at, count):
        ends = [self.u16(at + 10 + 2 * i) for i in range(count)]
        at += 10 + 2 * count
        at += 2 + self.u16(at)
        points = ends[-1] + 1
        flags = []
        while len(flags) < points:
            flag, at = self.data[at], at + 1
            repeat = 1
            if flag & 8:
                repeat, at = 1 + self.data[at], at + 1
            flags += [flag] * repeat
        axes = []
        for short, same in ((2, 16), (4, 32)):
            value, values = 0, []
            for flag in flags[:points]:
                if flag & short:
                    value += self.data[at] if flag & same else -self.data[at]
                    at += 1
                elif not flag & same:
                    value += self.i16(at)
                    at += 2
                values.append(value)
            axes.append(values)
        all_points = [(x, y, flag & 1) for x, y, flag in zip(axes[0], axes[1], flags)]
        return [all_points[(ends[i - 1] + 1 if i else 0) : ends[i] + 1] for i in range(count)]


def main():
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    font = Font(open(sys.argv[1], "rb").read())

    def scaled(v):
        return round(v * UNITS / font.em)

    starts, numbers = [], []
    for character in CHARACTERS:
        glyph = font.glyph_of(ord(character))
        contours = font.contours(glyph)
        starts.append(len(numbers))
        numbers += [scaled(font.advance(glyph)), len(contours)]
        for contour in contours:
            numbers.append(len(contour))
            for x, y, on in contour:
                numbers += [2 * scaled(x) + on, scaled(y)]
    print("// Made by scripts/make_font_outlines.py; do not edit.\n//")
    for line in LICENSE.split("\n"):
        print(f"// {line}".rstrip())
    print('#include "concerto/train/font_outlines.h"\n\nnamespace concerto {\n\n// clang-format off')
    for name, values in (("kGlyphStarts", starts), ("kGlyphNumbers", numbers)):
        text = textwrap.fill(", ".join(map(str, values)) + "};", 118, initial_indent="    ", subsequent_indent="    ")
        print(f"const int16_t {name}[{len(values)}] = {{\n{text}")
    print("// clang-format on\n\n}  // namespace concerto")


if __name__ == "__main__":
    main()
