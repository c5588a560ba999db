//! A file of Markdown: its headings, links and blocks of code.

use super::workspace;
use pulldown_cmark::{CodeBlockKind, Event, Options, Parser, Tag, TagEnd};
use std::collections::HashSet;
use std::path::{Path, PathBuf};

pub struct Page {
    pub path: PathBuf,
    /// The path from the top of the repository.
    pub name: String,
    pub anchors: HashSet<String>,
    pub links: Vec<String>,
    pub blocks: Vec<Block>,
}

/// A block of code.
pub struct Block {
    /// The page and the line, for messages.
    pub place: String,
    /// The word behind the fence; "indented" without a fence.
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
        let (mut heading, mut block, mut comment) = (None::<String>, None::<Block>, None::<String>);
        for (event, range) in Parser::new_ext(text, Options::ENABLE_TABLES).into_offset_iter() {
            match event {
                Event::Html(html) => {
                    comment = comment_of(&html);
                    continue;
                }
                Event::Start(Tag::HtmlBlock) | Event::End(TagEnd::HtmlBlock) => continue,
                Event::Start(Tag::Link { dest_url, .. } | Tag::Image { dest_url, .. }) => {
                    self.links.push(dest_url.into_string());
                }
                Event::Start(Tag::Heading { .. }) => heading = Some(String::new()),
                Event::End(TagEnd::Heading(_)) => self.anchors.extend(heading.take().map(|text| anchor(&text))),
                Event::Start(Tag::CodeBlock(kind)) => {
                    let language = match kind {
                        CodeBlockKind::Fenced(language) => language.into_string(),
                        CodeBlockKind::Indented => "indented".into(),
                    };
                    let place = format!("{}:{}", self.name, text[..range.start].matches('\n').count() + 1);
                    block = Some(Block { place, language, text: String::new(), comment: comment.take() });
                }
                Event::End(TagEnd::CodeBlock) => self.blocks.extend(block.take()),
                Event::Text(text) | Event::Code(text) => {
                    for target in [heading.as_mut(), block.as_mut().map(|block| &mut block.text)].into_iter().flatten()
                    {
                        target.push_str(&text);
                    }
                }
                _ => {}
            }
            comment = None;
        }
    }
}

fn comment_of(html: &str) -> Option<String> {
    Some(html.trim().strip_prefix("<!--")?.strip_suffix("-->")?.trim().to_owned())
}

/// The anchor that code hosts and mdBook give a heading.
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
    assert_eq!(blocks, [("sh", "one\n", Some("run")), ("c", "two\n", None), ("indented", "three\n", None)]);
    assert_eq!(page.blocks[1].place, "page:10");
    assert!(page.anchors.contains("a-b-c"));
}
