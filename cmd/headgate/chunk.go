package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
)

// deltaText is the text of one chunk of a chat stream.
func deltaText(data string) (string, error) {
	var chunk struct {
		Error   *struct{ Message string }
		Choices []struct{ Delta struct{ Content string } }
	}
	if err := json.Unmarshal([]byte(data), &chunk); err != nil {
		return "", fmt.Errorf("a chunk of the stream can't be read: %w", err)
	}
	if chunk.Error != nil {
		return "", errors.New(chunk.Error.Message)
	}
	var text strings.Builder
	for _, c := range chunk.Choices {
		text.WriteString(c.Delta.Content)
	}
	return text.String(), nil
}
