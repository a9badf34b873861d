//! A Rust source file as tokens. Comments and the contents of strings are not tokens, so a rule
//! that searches for `unwrap` does not match text about it.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow};
use proc_macro2::{Delimiter, TokenStream, TokenTree};

/// Kind of a token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Kind {
    Ident(String),
    Punct(char),
    Literal,
    Open(Delimiter),
    Close(Delimiter),
}

/// A token and its position.
#[derive(Debug, Clone)]
pub(crate) struct Token {
    pub(crate) kind: Kind,
    /// First line, from 1.
    pub(crate) line: usize,
    /// Last line; differs from `line` for literals of several lines.
    pub(crate) last_line: usize,
    /// True inside an item that only tests compile.
    pub(crate) in_test: bool,
}

impl Token {
    pub(crate) fn is_ident(&self, name: &str) -> bool {
        matches!(&self.kind, Kind::Ident(ident) if ident == name)
    }

    pub(crate) fn is_punct(&self, char: char) -> bool {
        self.kind == Kind::Punct(char)
    }

    pub(crate) fn opens(&self, delimiter: Delimiter) -> bool {
        self.kind == Kind::Open(delimiter)
    }
}

/// A tokenised file.
#[derive(Debug)]
pub(crate) struct Source {
    /// Path relative to the root of the repository.
    pub(crate) path: PathBuf,
    pub(crate) text: String,
    pub(crate) tokens: Vec<Token>,
    /// Names of the modules declared as `#[cfg(test)] mod name;`, whose files are tests as a whole.
    pub(crate) test_modules: Vec<String>,
}

impl Source {
    pub(crate) fn parse(path: &Path, text: String) -> anyhow::Result<Self> {
        let stream: TokenStream = text
            .parse()
            .map_err(|error| anyhow!("{error}"))
            .with_context(|| format!("{} is not Rust", path.display()))?;
        let lines: Vec<&str> = text.lines().collect();
        let mut tokens = Vec::new();
        flatten(stream, &lines, &mut tokens);
        let test_modules = mark_tests(&mut tokens);
        Ok(Self {
            path: path.to_owned(),
            text,
            tokens,
            test_modules,
        })
    }

    /// Marks the whole file as a test.
    pub(crate) fn mark_as_test(&mut self) {
        for token in &mut self.tokens {
            token.in_test = true;
        }
    }

    /// Returns the number of lines with at least one token of code that is not a test. Blank lines
    /// and comments do not count.
    pub(crate) fn lines_of_code(&self) -> usize {
        self.tokens
            .iter()
            .filter(|token| !token.in_test)
            .flat_map(|token| token.line..=token.last_line)
            .collect::<BTreeSet<_>>()
            .len()
    }

    /// Returns true if the tokens of `fragment`, a Rust fragment, occur in a row.
    pub(crate) fn contains(&self, fragment: &str) -> bool {
        let Ok(pattern) = Self::parse(Path::new("fragment"), fragment.to_owned()) else {
            return false;
        };
        self.tokens.windows(pattern.tokens.len()).any(|window| {
            window
                .iter()
                .zip(&pattern.tokens)
                .all(|(token, wanted)| token.kind == wanted.kind)
        })
    }
}

fn flatten(stream: TokenStream, lines: &[&str], out: &mut Vec<Token>) {
    let mut trees = stream.into_iter().peekable();
    while let Some(tree) = trees.next() {
        let start = tree.span().start();
        let push = |out: &mut Vec<Token>, kind, line, last_line| {
            out.push(Token {
                kind,
                line,
                last_line,
                in_test: false,
            });
        };
        match tree {
            TokenTree::Punct(punct) if punct.as_char() == '#' && is_comment(lines, start) => {
                // The lexer converts `/// text` to `#[doc = "text"]` and `//! text` to `#![doc =
                // "text"]`.
                if matches!(trees.peek(), Some(TokenTree::Punct(bang)) if bang.as_char() == '!') {
                    trees.next();
                }
                trees.next();
            }
            TokenTree::Group(group) => {
                let (open, close) = (group.span_open().start(), group.span_close().end());
                push(out, Kind::Open(group.delimiter()), open.line, open.line);
                flatten(group.stream(), lines, out);
                push(out, Kind::Close(group.delimiter()), close.line, close.line);
            }
            TokenTree::Ident(ident) => {
                push(out, Kind::Ident(ident.to_string()), start.line, start.line);
            }
            TokenTree::Punct(punct) => {
                push(out, Kind::Punct(punct.as_char()), start.line, start.line);
            }
            TokenTree::Literal(literal) => {
                let end = literal.span().end().line;
                push(out, Kind::Literal, start.line, end);
            }
        }
    }
}

fn is_comment(lines: &[&str], at: proc_macro2::LineColumn) -> bool {
    let line = lines.get(at.line.wrapping_sub(1)).copied().unwrap_or("");
    line.chars().nth(at.column) == Some('/')
}

/// Marks code that only tests compile and returns the names of out-of-line test modules.
fn mark_tests(tokens: &mut [Token]) -> Vec<String> {
    let mut modules = Vec::new();
    let mut at = 0;
    while at < tokens.len() {
        let Some((attribute_end, inner)) = attribute(tokens, at) else {
            at += 1;
            continue;
        };
        if !is_test_attribute(&tokens[at..=attribute_end]) {
            at = attribute_end + 1;
            continue;
        }
        let end = if inner {
            tokens.len() - 1
        } else {
            item_end(tokens, attribute_end + 1)
        };
        if let Some(name) = declared_module(&tokens[at..=end]) {
            modules.push(name);
        }
        for token in &mut tokens[at..=end] {
            token.in_test = true;
        }
        at = end + 1;
    }
    modules
}

/// If an attribute begins at `at`, returns its end, and true if it is an inner one (`#![...]`).
fn attribute(tokens: &[Token], at: usize) -> Option<(usize, bool)> {
    if !tokens.get(at)?.is_punct('#') {
        return None;
    }
    let inner = tokens.get(at + 1)?.is_punct('!');
    let open = at + 1 + usize::from(inner);
    tokens
        .get(open)?
        .opens(Delimiter::Bracket)
        .then(|| (matching_close(tokens, open), inner))
}

fn is_test_attribute(attribute: &[Token]) -> bool {
    let idents: Vec<&str> = attribute
        .iter()
        .filter_map(|token| match &token.kind {
            Kind::Ident(ident) => Some(ident.as_str()),
            _ => None,
        })
        .collect();
    match idents.as_slice() {
        ["test"] => true,
        // `any(test, feature = "std")` also compiles outside tests.
        ["cfg", rest @ ..] => {
            rest.contains(&"test") && !rest.contains(&"not") && !rest.contains(&"any")
        }
        _ => false,
    }
}

/// Returns the last token of the item that begins at `from`: its closing brace or semicolon.
fn item_end(tokens: &[Token], from: usize) -> usize {
    let mut at = from;
    while at < tokens.len() {
        match tokens[at].kind {
            Kind::Open(Delimiter::Brace) => return matching_close(tokens, at),
            Kind::Open(_) => at = matching_close(tokens, at),
            Kind::Punct(';') => return at,
            _ => {}
        }
        at += 1;
    }
    tokens.len() - 1
}

/// Returns the index of the token that closes the group opened at `open`.
pub(crate) fn matching_close(tokens: &[Token], open: usize) -> usize {
    let mut depth = 0_usize;
    for (index, token) in tokens.iter().enumerate().skip(open) {
        match token.kind {
            Kind::Open(_) => depth += 1,
            Kind::Close(_) => {
                depth -= 1;
                if depth == 0 {
                    return index;
                }
            }
            _ => {}
        }
    }
    tokens.len() - 1
}

fn declared_module(item: &[Token]) -> Option<String> {
    match item {
        [.., module, name, semicolon] if module.is_ident("mod") && semicolon.is_punct(';') => {
            match &name.kind {
                Kind::Ident(name) => Some(name.clone()),
                _ => None,
            }
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(text: &str) -> Source {
        Source::parse(Path::new("a.rs"), text.to_owned()).unwrap()
    }

    fn live(text: &str, name: &str) -> bool {
        source(text)
            .tokens
            .iter()
            .any(|token| token.is_ident(name) && !token.in_test)
    }

    #[test]
    fn comments_and_strings_are_no_tokens() {
        for text in [
            "// unwrap\nfn a() {}",
            "/// unwrap\nfn a() {}",
            "//! unwrap\nfn a() {}",
            "/** unwrap */ fn a() {}",
            "fn a() { let _ = \"unwrap\"; }",
            "fn a() { let _ = r#\"unwrap\"#; }",
        ] {
            assert!(!live(text, "unwrap"), "{text}");
        }
        assert!(live("fn a() { b.unwrap(); }", "unwrap"));
    }

    #[test]
    fn test_items_are_recognised() {
        for (text, expected) in [
            ("#[cfg(test)] mod tests { fn x() {} }", false),
            ("#[cfg(all(test, unix))] mod tests { fn x() {} }", false),
            ("#[cfg(not(test))] fn x() {}", true),
            ("#[cfg(any(test, feature = \"fake\"))] fn x() {}", true),
            ("#[test] #[ignore] fn x() {}", false),
            ("#![cfg(test)] fn x() {}", false),
            ("#[cfg(test)] use a::b; fn x() {}", true),
            ("#[cfg(test)] mod t { } fn x() {}", true),
            ("#[cfg(feature = \"test\")] fn x() {}", true),
        ] {
            assert_eq!(live(text, "x"), expected, "{text}");
        }
    }

    #[test]
    fn out_of_line_test_modules_are_named() {
        let source = source("#[cfg(test)]\nmod reference;\nmod other;");
        assert_eq!(source.test_modules, ["reference"]);
    }

    #[test]
    fn lines_of_code_leave_out_blanks_comments_and_tests() {
        let text = "//! Title\n\n/// Doc\nfn a() {\n    // why\n    b(\"x\n \
            y\");\n}\n\n#[cfg(test)]\nmod tests {\n    fn t() {}\n}\n";
        assert_eq!(source(text).lines_of_code(), 4);
    }
}
