//! A Markdown file: its headings, links and code blocks.

use super::workspace;
use markdown::{ParseOptions, mdast::Node};
use std::collections::HashSet;
use std::path::{Path, PathBuf};

pub struct Page {
    pub path: PathBuf,
    /// The path relative to the repository's root.
    pub name: String,
    pub anchors: HashSet<String>,
    pub links: Vec<String>,
    pub blocks: Vec<Block>,
}

/// A code block.
pub struct Block {
    /// The page and the line, for messages.
    pub place: String,
    /// The word after the fence; empty if there is none.
    pub language: String,
    pub text: String,
    /// The comment right before the block.
    pub comment: Option<String>,
}

impl Page {
    pub fn read(path: &Path) -> Page {
        let text = std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let name = path.strip_prefix(workspace()).unwrap_or(path).display().to_string();
        let (anchors, links, blocks) = (HashSet::new(), Vec::new(), Vec::new());
        let mut page = Page { path: path.to_path_buf(), name, anchors, links, blocks };
        page.parse(&text);
        page
    }

    fn parse(&mut self, text: &str) {
        // Only MDX has syntax errors.
        let tree = markdown::to_mdast(text, &ParseOptions::gfm()).expect("Markdown");
        self.visit(&tree, &mut None);
    }

    /// Collects what is in the node and its descendants; `comment` is the one right before the node.
    fn visit(&mut self, node: &Node, comment: &mut Option<String>) {
        match node {
            Node::Html(html) => {
                *comment = comment_of(&html.value);
                return;
            }
            Node::Link(link) => self.links.push(link.url.clone()),
            Node::Image(image) => self.links.push(image.url.clone()),
            Node::Heading(_) => drop(self.anchors.insert(anchor(&node.to_string()))),
            Node::Code(code) => self.blocks.push(Block {
                place: format!("{}:{}", self.name, code.position.as_ref().map_or(0, |position| position.start.line)),
                language: code.lang.clone().unwrap_or_default(),
                text: code.value.clone() + "\n",
                comment: comment.take(),
            }),
            _ => {}
        }
        *comment = None;
        for child in node.children().into_iter().flatten() {
            self.visit(child, comment);
        }
    }
}

fn comment_of(html: &str) -> Option<String> {
    Some(html.trim().strip_prefix("<!--")?.strip_suffix("-->")?.trim().to_owned())
}

/// Returns the anchor that code hosts and mdBook give a heading.
fn anchor(heading: &str) -> String {
    let kept = heading.trim().to_lowercase();
    kept.chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c)).map(|c| if c == ' ' { '-' } else { c }).collect()
}

#[test]
fn comment_belongs_to_the_block_right_behind_it() {
    let mut page = Page {
        path: PathBuf::new(),
        name: "page".into(),
        anchors: HashSet::new(),
        links: Vec::new(),
        blocks: Vec::new(),
    };
    page.parse("# A *b*: `c`\n\n<!-- run -->\n```sh\none\n```\n\n<!-- x -->\ntext\n```c\ntwo\n```\n\n    three\n");
    let blocks: Vec<_> =
        page.blocks.iter().map(|block| (&*block.language, &*block.text, block.comment.as_deref())).collect();
    assert_eq!(blocks, [("sh", "one\n", Some("run")), ("c", "two\n", None), ("", "three\n", None)]);
    assert_eq!(page.blocks[1].place, "page:10");
    assert!(page.anchors.contains("a-b-c"));
}
