//! Checks a report against docs/perf.schema.json. Knows only the JSON Schema keywords used there.

use serde_json::Value;

/// Checks a report from `ferrogin perf`.
pub fn check(report: &Value) -> Result<(), String> {
    let path = ferrogin_test_support::workspace().join("docs/perf.schema.json");
    let schema: Value = serde_json::from_slice(&std::fs::read(path).expect("the schema")).expect("JSON");
    matches(report, &schema, &schema, "report")
}

fn matches(value: &Value, schema: &Value, root: &Value, place: &str) -> Result<(), String> {
    let refused = |why: String| Err(format!("{place}: {why}"));
    for (word, rule) in schema.as_object().expect("a schema is an object") {
        match &**word {
            "$schema" | "$defs" | "title" | "description" => {}
            "$ref" => {
                let target = rule.as_str().and_then(|target| root.pointer(target.strip_prefix('#')?));
                matches(value, target.expect("the reference has a target"), root, place)?;
            }
            "type" => {
                let types = rule.as_array().cloned().unwrap_or_else(|| vec![rule.clone()]);
                if !types.iter().any(|name| has_type(value, name.as_str().unwrap())) {
                    return refused(format!("{value} is no {rule}"));
                }
            }
            "const" if value != rule => return refused(format!("{value} is not {rule}")),
            "enum" if !rule.as_array().unwrap().contains(value) => return refused(format!("{value} is not in {rule}")),
            "minimum" if value.as_f64().is_some_and(|number| number < rule.as_f64().unwrap()) => {
                return refused(format!("{value} is below {rule}"));
            }
            "const" | "enum" | "minimum" => {}
            "required" if !value.is_object() => {}
            "required" => {
                let missing = rule.as_array().unwrap().iter().find(|name| value.get(name.as_str().unwrap()).is_none());
                if let Some(name) = missing {
                    return refused(format!("{name} is missing"));
                }
            }
            "properties" => {}
            "additionalProperties" => {
                for (name, field) in value.as_object().into_iter().flatten() {
                    match (schema.get("properties").and_then(|properties| properties.get(name)), rule) {
                        (Some(known), _) => matches(field, known, root, &format!("{place}.{name}"))?,
                        (None, Value::Bool(_)) => return refused(format!("{name} is unknown")),
                        (None, more) => matches(field, more, root, &format!("{place}.{name}"))?,
                    }
                }
            }
            "items" => {
                for (at, item) in value.as_array().into_iter().flatten().enumerate() {
                    matches(item, rule, root, &format!("{place}[{at}]"))?;
                }
            }
            other => panic!("this check does not know the word {other} of JSON Schema"),
        }
    }
    Ok(())
}

fn has_type(value: &Value, name: &str) -> bool {
    match name {
        "object" => value.is_object(),
        "array" => value.is_array(),
        "string" => value.is_string(),
        "boolean" => value.is_boolean(),
        "null" => value.is_null(),
        "integer" => value.is_u64() || value.is_i64(),
        "number" => value.is_number(),
        other => panic!("no type {other}"),
    }
}
