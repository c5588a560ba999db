// Reads the test vectors' JSON. Numbers stay text until a caller reads them; a 64-bit value is a string that starts
// with 0x.
#pragma once

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include <map>
#include <string>
#include <vector>

struct Json {
  enum Kind { Null, Bool, Number, String, List, Object } kind = Null;
  std::string text;
  std::vector<Json> items;
  std::map<std::string, Json> members;

  const Json& operator[](const char* key) const {
    static const Json none;
    auto found = members.find(key);
    return found == members.end() ? none : found->second;
  }
  const Json& operator[](size_t i) const {
    return items.at(i);
  }
  bool is_null() const {
    return kind == Null;
  }
  bool truth() const {
    return text == "true";
  }
  uint64_t number() const {
    return strtoull(text.c_str(), nullptr, 0);
  }
  static Json parse(const std::string& source) {
    size_t at = 0;
    Json value = parse_value(source, at);
    skip(source, at);
    if (at != source.size()) broken(at);
    return value;
  }

 private:
  [[noreturn]] static void broken(size_t at) {
    fprintf(stderr, "broken JSON at byte %zu\n", at);
    exit(2);
  }
  static void skip(const std::string& s, size_t& at) {
    while (at < s.size() && (s[at] == ' ' || s[at] == '\n' || s[at] == '\t' || s[at] == '\r')) at++;
  }
  static bool take(const std::string& s, size_t& at, char c) {
    skip(s, at);
    if (at >= s.size() || s[at] != c) return false;
    at++;
    return true;
  }
  static std::string parse_string(const std::string& s, size_t& at) {
    std::string out;
    if (!take(s, at, '"')) broken(at);
    while (at < s.size() && s[at] != '"') {
      if (s[at] == '\\') at++;
      out += s.at(at++);
    }
    at++;
    return out;
  }
  static Json parse_value(const std::string& s, size_t& at) {
    Json v;
    skip(s, at);
    if (at >= s.size()) broken(at);
    if (s[at] == '"') {
      v.kind = String;
      v.text = parse_string(s, at);
    } else if (take(s, at, '{')) {
      v.kind = Object;
      while (!take(s, at, '}')) {
        if (!v.members.empty() && !take(s, at, ',')) broken(at);
        std::string key = parse_string(s, at);
        if (!take(s, at, ':')) broken(at);
        v.members[key] = parse_value(s, at);
      }
    } else if (take(s, at, '[')) {
      v.kind = List;
      while (!take(s, at, ']')) {
        if (!v.items.empty() && !take(s, at, ',')) broken(at);
        v.items.push_back(parse_value(s, at));
      }
    } else {
      while (at < s.size() && (isalnum(s[at]) || s[at] == '-' || s[at] == '+' || s[at] == '.')) v.text += s[at++];
      if (v.text.empty()) broken(at);
      v.kind = v.text == "null" ? Null : v.text == "true" || v.text == "false" ? Bool : Number;
    }
    return v;
  }
};
