//! A `multipart/form-data` body, as far as an upload needs it.

use http::HeaderMap;
use http::header::CONTENT_TYPE;
use memchr::memmem;

/// One field of a form.
#[derive(Debug, PartialEq)]
pub(super) struct Field<'a> {
    pub(super) name: &'a str,
    pub(super) filename: Option<&'a str>,
    pub(super) content: &'a [u8],
}

/// The fields of a form; `None` if it is none, or if it is not whole.
pub(super) fn fields<'a>(headers: &HeaderMap, body: &'a [u8]) -> Option<Vec<Field<'a>>> {
    let content_type = headers.get(CONTENT_TYPE)?.to_str().ok()?;
    let parameters = content_type.strip_prefix("multipart/form-data")?;
    let boundary = parameters.split_once("boundary=")?.1.split(';').next()?.trim().trim_matches('"');
    let delimiter = format!("\r\n--{boundary}");
    let mut rest = body.strip_prefix(&delimiter.as_bytes()[2..])?;
    let mut fields = Vec::new();
    while let Some(part) = rest.strip_prefix(b"\r\n") {
        let end = memmem::find(part, delimiter.as_bytes())?;
        fields.push(field(&part[..end])?);
        rest = &part[end + delimiter.len()..];
    }
    rest.starts_with(b"--").then_some(fields)
}

fn field(part: &[u8]) -> Option<Field<'_>> {
    let head = memmem::find(part, b"\r\n\r\n")?;
    let lines = std::str::from_utf8(&part[..head]).ok()?;
    let disposition = lines.split("\r\n").find_map(|line| {
        let (name, value) = line.split_once(':')?;
        name.eq_ignore_ascii_case("content-disposition").then_some(value)
    })?;
    let parameter = |name: &str| {
        disposition.split(';').find_map(|p| p.trim().strip_prefix(name)?.strip_prefix('=')).map(|v| v.trim_matches('"'))
    };
    Some(Field { name: parameter("name")?, filename: parameter("filename"), content: &part[head + 4..] })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(content_type: &'static str, body: &'static str) -> Option<Vec<Field<'static>>> {
        let mut headers = HeaderMap::new();
        headers.insert(CONTENT_TYPE, content_type.parse().unwrap());
        fields(&headers, body.as_bytes())
    }

    #[test]
    fn a_form_is_taken_apart_at_its_boundary_and_nowhere_else() {
        let body = "--b\r\nContent-Disposition: form-data; name=\"purpose\"\r\n\r\nbatch\r\n\
                    --b\r\ncontent-disposition: form-data; name=\"file\"; filename=\"a.jsonl\"\r\n\
                    Content-Type: application/jsonl\r\n\r\n{}\n--b\n\r\n{}\r\n\r\n--b--\r\n";
        let fields = read("multipart/form-data; boundary=\"b\"", body).unwrap();
        let file = Field { name: "file", filename: Some("a.jsonl"), content: b"{}\n--b\n\r\n{}\r\n" };
        assert_eq!(fields, [Field { name: "purpose", filename: None, content: b"batch" }, file]);
        assert_eq!(read("multipart/form-data; boundary=b", &body[..body.len() - 8]), None, "not whole");
        assert_eq!(read("multipart/form-data; boundary=c", body), None);
        assert_eq!(read("application/json; boundary=b", body), None);
    }
}
